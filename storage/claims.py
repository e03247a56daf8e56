"""Which run do several stores hold? Found out before anything else is read of them.

A ledger's header names the trainer's key, RELEASE.json is signed by that key and names the header's digest. The two
together prove which run they belong to, and may come from two stores where one of each pair is damaged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from storage.errors import InputFault, MissingObject, Refused, StorageError, VerbatimError
from storage.ledger import HEADER_KEY, MAX_HEADER, Header
from storage.release import MAX_RELEASE, RELEASE_KEY, Release, named_run, signed_release
from storage.store import Store, sound

FAULTS = (InputFault, StorageError)  # what makes a copy a bad one
Tell = Callable[[Store, str, VerbatimError], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """A ledger's header, and a release that is proven to be of its run. uri: the store that the release came from."""

    uri: str
    header: Header
    release: Release

    @property
    def run(self) -> str:
        return self.release.body.run


def agreed(stores: Sequence[Store], tell: Tell) -> Claim:
    """The claim of the first store that has a sound one, after a look at whether the others are copies of the same run.

    tell: is called for each header and RELEASE.json that is not sound. Raises Refused where two runs are mixed, or
    where nothing is published; InputFault, naming each store, where no release can be proven.
    """
    failures: dict[str, VerbatimError] = {}
    claim = None
    for store in stores:
        try:
            claim = sound(store, HEADER_KEY, _claim)
            break
        except FAULTS as error:
            failures[store.uri] = error
    claim = claim or _joined(stores)
    for store in stores:
        failure = failures.get(store.uri)
        if claim is None and failure:
            tell(store, getattr(failure, "key", "") or HEADER_KEY, failure)
        elif claim and (failure or store.uri != claim.uri):
            _check_copy(store, claim, failure, tell)
    if claim is None:
        raise _nowhere(stores, list(failures.values()))
    return claim


def none_sound(what: str, failures: Sequence[VerbatimError]) -> VerbatimError:
    """The error for something that is sound in no store; of one store its own."""
    if len(failures) == 1:
        return failures[0]
    kinds: list[type[VerbatimError]] = [type(failure) for failure in failures if isinstance(failure, InputFault)]
    each = "\n".join(f"  {failure.message}" for failure in failures)
    return next(iter(kinds), StorageError)(
        f"{what} is sound in none of {len(failures)} stores:\n{each}",
        cause=failures[0].cause,
        next_step="name a further copy by --mirror, or fetch it again from its publisher",
    )


def _claim(store: Store) -> Claim:
    """What one store alone claims; its faults say which of the two objects is wrong."""
    with _named(HEADER_KEY):
        header = _header(store)
    with _named(RELEASE_KEY):
        return _proven(store, [header])


def _joined(stores: Sequence[Store]) -> Claim | None:
    """A claim whose header lies in one store and whose RELEASE.json in another; None if there is none."""
    headers = [header for store in stores if (header := _if_sound(store, _header))]
    claims = (_if_sound(store, lambda copy: _proven(copy, headers)) for store in stores)
    return next((claim for claim in claims if claim), None)


def _check_copy(store: Store, claim: Claim, failure: VerbatimError | None, tell: Tell) -> None:
    """Tell which of a store's two objects is not the claimed run's; Refused if it holds another run, as a store whose
    header is damaged says by its RELEASE.json. failure: why it could not be believed by itself."""
    try:
        if (found := sound(store, HEADER_KEY, _header).digest()) == claim.run:
            if failure:
                tell(store, RELEASE_KEY, failure)
            return
        error: VerbatimError = InputFault(f"{store.uri}: {HEADER_KEY} has digest {found}, expected {claim.run}")
    except FAULTS as fault:
        error = fault
    tell(store, HEADER_KEY, error)
    try:
        sound(store, RELEASE_KEY, lambda copy: _proven(copy, [claim.header]))
    except FAULTS as fault:
        run = _if_sound(store, _named_run) if isinstance(fault, InputFault) else None
        if run and run != claim.run:
            raise Refused(
                f"{store.uri} holds run {run}, {claim.uri} run {claim.run}: these are no copies of one release",
                cause="a slip in an address",
                next_step="name stores to which the same run was published",
            ) from None
        tell(store, RELEASE_KEY, fault)


def _header(store: Store) -> Header:
    return Header.parse(store.read(HEADER_KEY, limit=MAX_HEADER), f"{store.uri}: {HEADER_KEY}")


def _named_run(store: Store) -> str:
    return named_run(store.read(RELEASE_KEY, limit=MAX_RELEASE))


def _proven(store: Store, headers: Sequence[Header]) -> Claim:
    """The store's release with that of the headers under whose key it is signed; InputFault if that is none."""
    where = f"{store.uri}: {RELEASE_KEY}"
    data = store.read(RELEASE_KEY, limit=MAX_RELEASE)
    release = signed_release(data, where, {header.trainer for header in headers})
    run = release.body.run
    header = next((header for header in headers if header.digest() == run), None)
    if header is None:
        raise InputFault(
            f"{where} is of run {run}, {HEADER_KEY} of {', '.join(header.digest() for header in headers)}",
            cause="one of the two was damaged, or is another run's",
        )
    return Claim(store.uri, header, release)


def _nowhere(stores: Sequence[Store], failures: Sequence[VerbatimError]) -> VerbatimError:
    """The error where no store has a sound claim."""
    where = " and ".join(store.uri for store in stores)
    if not all(isinstance(failure, MissingObject) for failure in failures):
        return none_sound(f"{HEADER_KEY} with {RELEASE_KEY}", failures)
    if all(failure.key == HEADER_KEY for failure in failures if isinstance(failure, MissingObject)):
        return Refused(f"{where}: no run is there, so there is nothing to compare with", next_step="check the address")
    return Refused(
        f"{where}: no {RELEASE_KEY}: this is not a finished publication",
        cause="publishing was interrupted, or this is a run's own folder",
        next_step="verbatim publish, again if it was stopped",
    )


def _if_sound(store: Store, read: Callable[[Store], T]) -> T | None:
    try:
        return sound(store, HEADER_KEY, read)
    except FAULTS:
        return None


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Faults within say that they are this object's."""
    try:
        yield
    except InputFault as fault:
        fault.key = key
        raise
