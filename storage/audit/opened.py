"""Where openings lie: in a store of their own beside each copy of a release.

    <address of the copy>/opened/    checkpoints/<k>.json, objects/<digest>, openings/<N>.json    (opening.py)

A release is signed, and never changes; an opening is made later, by anyone. No list vouches for it: whoever reads it
proves it by the ledger, and takes from beside another copy what is damaged beside one. An opened state that is sound
nowhere is told and passed over, for the state before it.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from storage import checkpoint
from storage.claims import FAULTS
from storage.errors import Refused, StorageError, VerbatimError
from storage.ledger import Ledger
from storage.mirrors import BadCopy, Beside
from storage.release import load_release
from storage.run import Run
from storage.store import Store

FOLDER = "opened"
T = TypeVar("T")

_KEY = re.compile(r"openings/(\d{8})\.json", re.ASCII)


def opening_key(step: int) -> str:
    """Key of the opening of a step, in a store of openings."""
    return f"openings/{step:08d}.json"


def opened_beside(release: Store) -> Beside:
    """The openings beside all copies of the release; `stores` has one for each, the preferred first."""
    return Beside(release, FOLDER)


def is_open(release: Store, step: int) -> bool:
    """Whether an opening of the step lies beside any copy. StorageError where none was found, and one could not be
    asked."""
    key = opening_key(step)
    return key in opened_beside(release).list(key)


def opened_steps(release: Store) -> frozenset[int]:
    """Steps that have an opening beside any copy of the release; a copy that cannot be asked has none."""
    keys: list[str] = []
    with suppress(StorageError):
        keys = opened_beside(release).list("openings/")
    return frozenset(int(match[1]) for match in map(_KEY.fullmatch, keys) if match)


def published_states(release: Store) -> list[tuple[int, Store]]:
    """(k, store that holds it) of every state that is said to be published: checkpoints, then what was opened."""
    found, beside = [(k, release) for k in checkpoint.steps(release)], opened_beside(release)
    with suppress(StorageError):  # what cannot be asked only makes a replay longer
        found += [(k, beside) for k in checkpoint.steps(beside)]
    return found


def proven_states(release: Store, ledger: Ledger) -> Callable[[int], bool]:
    """Says of k whether state k was published, and the ledger proves it as far as can be seen without reading it: a
    file that only bears the name, in the release or beside it, answers no draw."""
    stores: dict[int, list[Store]] = {}
    for k, store in published_states(release):
        stores.setdefault(k, []).append(store)
    return lambda k: any(_is_there(store, ledger, k) for store in stores.get(k, ()))


def _is_there(store: Store, ledger: Ledger, step: int) -> bool:
    try:
        checkpoint.check_there(store, ledger, step)
    except FAULTS:
        return False
    return True


def state_at(release: Store, step: int) -> Store | None:
    """Where state `step` is said to be published, None where it is not."""
    return next((store for k, store in published_states(release) if k == step), None)


def from_nearest(run: Run, step: int, load: Callable[[int, Store], T]) -> T:
    """`load(k, store)` of the last state k at or before `step` that was published, a checkpoint before what was opened.

    In an opened state, or in a checkpoint that the release does not list, `load` may find a fault: that is told among
    the bad copies, and the next one before it is taken. What is listed was signed, so a fault in it is raised. Refused
    where there is none.
    """
    found = [(k, store) for k, store in published_states(run.store) if k <= step]
    for k, store in sorted(found, key=lambda state: state[0], reverse=True):
        try:
            return load(k, store)
        except FAULTS as error:
            key = checkpoint.checkpoint_key(k)
            if store is run.store and key in load_release(run.store, run.ledger).objects:
                raise
            _tell(run, store, key, error)
    raise Refused(f"no checkpoint at or before step {step} was published")


def _tell(run: Run, where: Store, key: str, error: VerbatimError) -> None:
    """Report a state wherever it is said to lie."""
    for store in where.stores if isinstance(where, Beside) else [where]:
        with suppress(*FAULTS):
            if key in store.list(key):
                run.passed_over.append(BadCopy(store.uri, key, error.message))
