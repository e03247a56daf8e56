"""What came after a release was signed: no list vouches for it, so each object proves itself.

    audits/{statements,witnesses,draws,beacons,certificates,disputes,evaluations}/…    by signatures, as those listed
    opened/{openings,checkpoints,objects}/…                                            by the ledger's roots: opening.py

It is found by listing these prefixes of each copy. What lies anywhere else, and is not listed, belongs to nobody.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from storage import checkpoint
from storage.audit.kept import AUDITS, records_of
from storage.audit.opened import opened_beside
from storage.audit.opening import load_gradient, load_opening
from storage.classes import may_come_later
from storage.errors import InputFault
from storage.mirrors import present, stores_of
from storage.objects import MAX_OBJECT, Keys
from storage.release import RELEASE_KEY
from storage.run import Run
from storage.store import Store

Later = dict[str, set[str]]  # address of a copy → keys there that are not listed


def find_later(store: Store, listed: Collection[str]) -> Later:
    """What lies in each copy beside the list; InputFault for anything that may not come later."""
    found: Later = {copy.uri: set() for copy in stores_of(store)}
    for uri, key in present(store):
        if key == RELEASE_KEY or key in listed:
            continue
        if not may_come_later(key):
            raise InputFault(
                f"{uri} holds {key}, which {RELEASE_KEY} does not list",
                cause="it was put there after the release was signed, and nobody vouches for it",
                next_step="do not use it; tell whoever keeps this copy",
            )
        found[uri].add(key)
    return found


def check_later(run: Run, later: Later) -> None:
    """InputFault or CertificateFault for a record that is not genuine or of another run, and for an opening or an
    opened state that is sound beside no copy."""
    for copy in stores_of(run.store):
        if records := {key for key in later[copy.uri] if key.startswith(AUDITS)}:
            genuine = records_of(_Joined(run.store, copy, records), run.ledger, AUDITS)
            check_genuine(run, records, genuine)
    beside = opened_beside(run.store)
    for step in checkpoint.steps(beside):
        checkpoint.check(beside, run.ledger, step)
    for key in beside.list("openings/"):
        load_gradient(run, load_opening(run, int(key.removeprefix("openings/").removesuffix(".json"))))


def check_genuine(run: Run, keys: Collection[str], genuine: Mapping[str, str]) -> None:
    """InputFault for the first of these records of audits that is none of this run's."""
    if odd := sorted(set(keys) - genuine.keys()):
        raise InputFault(
            f"{odd[0]} is no record of an audit of run {run.ledger.run_id}",
            cause="another run's records were taken in, or ones of a kind that this version does not know",
            next_step="do not rely on these records; ask who put them there",
        )


def counts(later: Later) -> dict[str, int]:
    """How many objects there are of each kind, in all copies together: "certificates", "openings" and so on."""
    return dict(Counter(key.split("/")[1] for key in sorted(set().union(*later.values()))))


class _Joined:
    """The records of one copy: those that are listed, from whichever copy has them, and what came later to this one."""

    def __init__(self, release: Store, copy: Store, later: Collection[str]) -> None:
        self._release, self._copy, self._later = release, copy, later

    def list(self, prefix: str = "") -> Keys:
        here = (key for key in self._later if key.startswith(prefix))
        return sorted({*self._release.list(prefix), *here})

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        return (self._copy if key in self._later else self._release).read(key, digest, limit)
