"""The processes that do a step together, as the step sees them: what one rank needs of the others.

Ranks share the units of a step, each sums the gradients of its own, and the integer sums are joined, so that each rank
has those of the rows that it owns. No float is added across ranks: floats travel as bytes. What a rank holds by
parameter name are its own rows, and parameters of which it owns none are missing; `Alone` owns everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, Protocol

from kernels import digest
from kernels.interface import Weight
from model.ordered import Order
from model.ordered_step import Gradient, replayed

Tensors = dict[str, Any]
Kind = Literal["state", "gradient", "mean"]  # a state's f32, summed gradients i64, the f32 mean of an ordered reduction
Digested = tuple[dict[str, str], tuple[str, ...]]  # of each tensor by name; names of those that are zero
LeavesOf = Callable[[Mapping[str, Any]], Mapping[str, bytes]]


class Group(Protocol):
    """What the step asks of its group. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def batches(self, units: int) -> Iterator[Sequence[int]]:
        """This rank's units, in batches after each of which all ranks join their sums."""

    def new_sums(self, backend: ModuleType, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Zeros i64 of every parameter, whole, for one batch."""

    def joined(self, sums: Tensors, before: Tensors) -> Tensors:
        """Own rows of the ranks' sums of a batch, added to those of the batches before."""

    def passed(self, unit: int, nll: Any, lse2: Any, flag: Any) -> None:
        """Told after each of this rank's units: the sums of its losses so far, which the device may still compute."""

    def ordered(self, order: Order, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient) -> Tensors:
        """Own rows of the units' mean gradient f32, on the host: the ordered reduction, in place of the three above.
        Every rank makes gradient(unit) of its own units alone."""

    def total(self, *values: int) -> list[int]:
        """The sum over ranks of each value."""

    def counts(self, own: dict[str, int]) -> dict[str, int]:
        """The sum over ranks of a number by parameter, of every parameter."""

    def tables(self, own: Tensors) -> Tensors:
        """Embedding and norm gains f32, whole: with them the backend computes what it would with the weights."""

    def codes(self, own: dict[str, Weight]) -> dict[str, Weight]:
        """Quantised weights, whole, from quantised rows."""

    def squares(self, own: Tensors) -> Tensors:
        """One f32 a row, of every row of every parameter; a vector is one row."""

    def digests(self, own: Mapping[str, Any], leaves_of: LeavesOf, kind: Kind) -> Digested:
        """Digest of each whole tensor of a state or a gradient, of which each rank digests its rows; and the names of
        those that are zero."""

    def whole(self, own: Tensors, kind: Kind) -> Tensors:
        """Every gradient, whole, from own rows."""


class Alone:
    """The group of one process: it owns every row, has nobody to ask, and hands everything back as it is."""

    rank = 0
    size = 1

    def batches(self, units: int) -> Iterator[Sequence[int]]:
        """All units at once."""
        yield range(units)

    def new_sums(self, backend: ModuleType, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Zeros."""
        return {name: backend.new_sums(shape) for name, shape in shapes.items()}

    def joined(self, sums: Tensors, before: Tensors) -> Tensors:
        """The sums of the only batch."""
        return sums

    def passed(self, unit: int, nll: Any, lse2: Any, flag: Any) -> None:
        """Nothing to do."""

    def ordered(self, order: Order, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient) -> Tensors:
        """The order's ranks, one after the other."""
        return replayed(order, shapes, gradient)

    def total(self, *values: int) -> list[int]:
        """The values."""
        return list(values)

    def counts(self, own: dict[str, int]) -> dict[str, int]:
        """The numbers."""
        return own

    def tables(self, own: Tensors) -> Tensors:
        """The weights themselves."""
        return own

    def codes(self, own: dict[str, Weight]) -> dict[str, Weight]:
        """The codes."""
        return own

    def squares(self, own: Tensors) -> Tensors:
        """The squares."""
        return own

    def digests(self, own: Mapping[str, Any], leaves_of: LeavesOf, kind: Kind) -> Digested:
        """The digest of each tensor, and the names of those that are zero."""
        return digested(own, leaves_of(own))

    def whole(self, own: Tensors, kind: Kind) -> Tensors:
        """The gradients."""
        return own


def digested(tensors: Mapping[str, Any], leaves: Mapping[str, bytes]) -> Digested:
    """(digest of each whole tensor by name, the names of those that are zero), from their leaves."""
    zero = tuple(name for name, tensor in tensors.items() if digest.is_zero(tensor, leaves[name]))
    return digest.tensor_digests(tensors, leaves), zero


ALONE: Group = Alone()
