"""The ordered reduction of a step's units, by one process; `model.ordered_ranks` has it by the ranks of the order.

    unit u              micro-batch u ÷ world of rank u mod world: units by index, as the exact reduction shares them
    its gradient        the int64 sums of the unit, each rounded once to float32
    what comes out      their mean over units, float32, in steps of 2⁻²⁴, by `model.ordered`

All parameters lie one behind the other in one row, so that they are reduced together; where they lie changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from model.ordered import Order, TreeFold, replay

Gradient = Callable[[int], Mapping[str, np.ndarray]]  # unit → its sums i64 by parameter, whole, on the host


class Piece(NamedTuple):
    """Some rows of a parameter."""

    name: str
    rows: slice
    shape: tuple[int, ...]  # of these rows

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def replayed(order: Order, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient) -> dict[str, np.ndarray]:
    """The mean of the units' gradients by parameter, f32, as the ranks of the order would reduce it.

    Every unit is done once, rank by rank, so that no more is held than rows_held() says.
    """
    pieces = [Piece(name, slice(0, shape[0]), shape) for name, shape in shapes.items()]
    mean = replay(order, lambda rank, index: joined(pieces, gradient(unit(order, rank, index))))
    return dict(cut(pieces, mean))


def unit(order: Order, rank: int, micro_batch: int) -> int:
    """Which of the step's units is a rank's micro-batch."""
    return micro_batch * order.world + rank


def joined(pieces: Iterable[Piece], sums: Mapping[str, np.ndarray]) -> np.ndarray:
    """The pieces' sums in one row, each rounded once to f32."""
    flat, at = np.empty(sum(piece.size for piece in pieces), np.float32), 0
    for name, rows, shape in pieces:
        end = at + math.prod(shape)
        flat[at:end] = sums[name][rows].reshape(-1)
        at = end
    return flat


def cut(pieces: Iterable[Piece], flat: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, its rows) of each piece of a row that these pieces make."""
    at = 0
    for piece in pieces:
        yield piece.name, flat[at : at + piece.size].reshape(piece.shape)
        at += piece.size


def rows_held(replicas: int, alone: bool) -> int:
    """How many float32 of each parameter are held at most beside the int64 sums of a unit: the unit's own and a rank's
    mean; in a replay TreeFold's too, whose limit counts a replica's mean."""
    return 2 + (TreeFold(replicas, "left_fold").limit if alone else 0)
