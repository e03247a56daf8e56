"""Tensor digests beside the ledger: they let a mismatch name the tensor, and prove themselves against the entry.

    digests/<step>.json    digests of every tensor of the state after the step and of its gradient

The entry holds only the two roots. A reader recomputes them from this record, so it need not be trusted.
"""

from collections.abc import Mapping
from typing import Any, Literal

from kernels.digest import root
from storage.errors import InputFault, MissingObject
from storage.ledger import Entry
from storage.records import Count, Digest, Record
from storage.store import Store, create_same

MAX_DIGESTS = 8 << 20


class StepDigests(Record):
    """Digests of one step by tensor name; scalars are the state's, from which its root is made."""

    kind: Literal["digests"] = "digests"
    step: Count
    scalars: dict[str, Any]
    tensors: dict[str, Digest]
    gradient: dict[str, Digest]


def digests_key(step: int) -> str:
    """Where the digests of `step` lie."""
    return f"digests/{step:08d}.json"


def save_digests(store: Store, digests: StepDigests) -> None:
    """Write them once; the same content again is fine."""
    create_same(store, digests_key(digests.step), digests.canonical())


def load_digests(store: Store, entry: Entry) -> StepDigests:
    """The digests of the entry's step; InputFault unless they give the entry's state and gradient roots."""
    key = digests_key(entry.step)
    digests = StepDigests.parse(store.read(key, limit=MAX_DIGESTS), key)
    gradient = None if entry.gradient is None and not digests.gradient else root(digests.gradient, {})
    for what, found, recorded in (
        ("step", digests.step, entry.step),
        ("state root", root(digests.tensors, digests.scalars), entry.state),
        ("gradient root", gradient, entry.gradient),
    ):
        if found != recorded:
            raise InputFault(
                f"{key}: its digests give {what} {found}, the ledger records {recorded}",
                cause="the object was damaged or edited",
                next_step="fetch it again from its publisher",
            )
    return digests


def differing_tensors(store: Store, entry: Entry, found: StepDigests) -> tuple[str, ...]:
    """Names of the tensors and scalars in which `found` differs from what was recorded; "" in front of none.

    A gradient's tensor is named "gradient/<parameter>". Empty if nothing usable was recorded.
    """
    try:
        recorded = load_digests(store, entry)
    except (MissingObject, InputFault):
        return ()
    scalars = _differing(recorded.scalars, found.scalars)
    gradient = tuple(f"gradient/{name}" for name in _differing(recorded.gradient, found.gradient))
    return gradient + _differing(recorded.tensors, found.tensors) + scalars


def _differing(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of ours alone: who forged the entry could have recorded any others, of any number and length."""
    return tuple(name for name in sorted(found) if recorded.get(name) != found[name])
