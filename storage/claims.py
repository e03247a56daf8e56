"""Which run do several stores hold? Found out before anything else is read of them.

A ledger's header names the trainer's key, RELEASE.json is signed by that key and names the header's digest. The two
together prove which run they belong to, and may come from two stores where one of each pair is damaged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage.audit.keys import verify_signature
from storage.errors import InputFault, MissingObject, Refused, StorageError, VerbatimError
from storage.ledger import HEADER_KEY, MAX_HEADER, Header
from storage.publish import MAX_RELEASE, PURPOSE, RELEASE_KEY, Object, Release
from storage.store import Store

FAULTS = (InputFault, StorageError)  # what makes a copy a bad one
Tell = Callable[[Store, str, VerbatimError], None]


@dataclass(frozen=True)
class Claim:
    """A release, proven to be of the run whose header this is: both as they were read, and what is listed."""

    header: bytes
    release: bytes
    objects: dict[str, Object]


def agreed(stores: Sequence[Store], tell: Tell) -> Claim:
    """The release of the first store that has one, after a look at whether the others are copies of the same run.

    tell: is called for each store whose header or RELEASE.json is not sound. Raises Refused where two runs are mixed,
    or where nothing is published; InputFault, naming each store, where no release can be proven.
    """
    headers = _headers(stores, tell)
    store, release = _first_release(stores, headers.values(), tell)
    for other in stores:
        header = headers.get(other.uri)
        if header is None or header.digest() != release.body.run:
            _check_same_run(other, header, store, release, tell)
    header = next(header for header in headers.values() if header.digest() == release.body.run)
    return Claim(header.canonical(), release.canonical(), release.body.objects)


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


def _headers(stores: Sequence[Store], tell: Tell) -> dict[str, Header]:
    """The header of each store that has one, by address."""
    found: dict[str, Header] = {}
    failures: list[VerbatimError] = []
    for store in stores:
        try:
            data = store.read(HEADER_KEY, limit=MAX_HEADER)
            found[store.uri] = Header.parse(data, f"{store.uri}: {HEADER_KEY}")
        except FAULTS as error:
            tell(store, HEADER_KEY, error)
            failures.append(error)
    if all(isinstance(failure, MissingObject) for failure in failures) and not found:
        raise Refused(
            f"{' and '.join(store.uri for store in stores)}: no run is there, so there is nothing to compare with",
            next_step="check the address",
        )
    if not found:
        raise none_sound(HEADER_KEY, failures)
    return found


def _first_release(stores: Sequence[Store], headers: Iterable[Header], tell: Tell) -> tuple[Store, Release]:
    failures: list[VerbatimError] = []
    for store in stores:
        try:
            release = _release(store)
            _check_signed(store, release, headers)
            return store, release
        except FAULTS as error:
            tell(store, RELEASE_KEY, error)
            failures.append(error)
    if all(isinstance(failure, MissingObject) for failure in failures):
        raise Refused(
            f"{' and '.join(store.uri for store in stores)}: no {RELEASE_KEY}: this is not a finished publication",
            cause="publishing was interrupted, or this is a run's own folder",
            next_step="verbatim publish, again if it was stopped",
        )
    raise none_sound(RELEASE_KEY, failures)


def _release(store: Store) -> Release:
    return Release.parse(store.read(RELEASE_KEY, limit=MAX_RELEASE), f"{store.uri}: {RELEASE_KEY}")


def _check_signed(store: Store, release: Release, headers: Iterable[Header]) -> None:
    body = release.body
    for header in headers:
        if header.digest() == body.run:
            if verify_signature(header.trainer, release.signature, body.canonical(), PURPOSE):
                return
            raise InputFault(
                f"{store.uri}: {RELEASE_KEY}: the signature is not that of the run's trainer {header.trainer}",
                cause="it was damaged or edited",
            )
    raise InputFault(
        f"{store.uri}: {RELEASE_KEY} is of run {body.run}, the headers that were found are of "
        f"{', '.join(dict.fromkeys(header.digest() for header in headers))}",
        cause=f"{HEADER_KEY} or {RELEASE_KEY} was damaged",
    )


def _check_same_run(store: Store, header: Header | None, first: Store, release: Release, tell: Tell) -> None:
    """Of a store without the run's header: a copy of which a part is bad, or another run's?"""
    run = release.body.run
    try:
        other = _release(store).body.run
    except FAULTS as error:
        tell(store, RELEASE_KEY, error)
    else:
        if other != run:
            raise Refused(
                f"{store.uri} holds run {other}, {first.uri} run {run}: these are no copies of one release",
                cause="a slip in an address",
                next_step="name stores to which the same run was published",
            )
    if header is not None:
        tell(store, HEADER_KEY, InputFault(f"{store.uri}: {HEADER_KEY} has digest {header.digest()}, expected {run}"))
