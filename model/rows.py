"""Which rows of which parameters each rank owns: it alone holds their weights and moments, updates and digests them.

    line      the rows of all linears and the head, of the embedding, or of the norm gains, in name order
    block     the fewest rows that are whole leaves of float32 and of int64 both; a vector is one
    piece     a line is cut between blocks into one contiguous piece a rank, each as long as the others to a block

A line holds what the ranks tell each other in one form, so each has as much to tell as the others. Everything here is
a function of (shapes, number of ranks), and none of it changes a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kernels.digest import leaf_rows
from model.spec import ModelSpec

Shape = tuple[int, ...]


class Span(NamedTuple):
    """Rows first … last − 1 of a parameter, owned by `rank`."""

    rank: int
    first: int
    last: int


@dataclass(frozen=True)
class Ownership:
    """lines: parameter names in the order of each line. spans: each parameter's owners, in the order of its rows."""

    size: int
    shapes: Mapping[str, Shape]
    lines: tuple[tuple[str, ...], ...]
    spans: Mapping[str, tuple[Span, ...]]

    def own(self, rank: int) -> dict[str, slice]:
        """Parameter → rows of this rank, in name order; without those of which it owns none."""
        owned = ((name, span) for name in sorted(self.spans) for span in self.spans[name] if span.rank == rank)
        return {name: slice(span.first, span.last) for name, span in owned}

    def elements(self, line: tuple[str, ...]) -> list[int]:
        """How many elements of a line each rank owns."""
        counts = [0] * self.size
        for name in line:
            for rank, first, last in self.spans[name]:
                counts[rank] += (last - first) * math.prod(self.shapes[name][1:])
        return counts


@lru_cache(maxsize=8)
def ownership(model: ModelSpec, size: int) -> Ownership:
    """Who owns which rows among `size` ranks."""
    shapes = model.shapes()
    lines = tuple(tuple(name for name in shapes if _line(name, shapes[name]) == line) for line in range(3))
    spans: dict[str, tuple[Span, ...]] = {}
    for line in lines:
        spans |= _cut({name: shapes[name] for name in line}, size)
    return Ownership(size, shapes, lines, spans)


def idle(units: int, size: int) -> int:
    """How many turns of a unit go unused by `size` ranks that share `units` units: 0 where they divide evenly."""
    return -units % size


def block_rows(shape: Shape) -> int:
    """The fewest rows that are whole leaves of the parameter and of its gradient."""
    return math.lcm(leaf_rows(shape, 4), leaf_rows(shape, 8))


def _line(name: str, shape: Shape) -> int:
    return 2 if len(shape) == 1 else int(name == "embed")


def _cut(shapes: Mapping[str, Shape], size: int) -> dict[str, tuple[Span, ...]]:
    """A block belongs to the rank in whose share of the line its middle lies."""
    total, before = sum(math.prod(shape) for shape in shapes.values()), 0
    spans = {}
    for name, shape in shapes.items():
        found: list[Span] = []
        for first, last in _blocks(shape):
            count = (last - first) * math.prod(shape[1:])
            rank = (2 * before + count) * size // (2 * total)
            before += count
            if found and found[-1].rank == rank:
                first = found.pop().first
            found.append(Span(rank, first, last))
        spans[name] = tuple(found)
    return spans


def _blocks(shape: Shape) -> Iterator[tuple[int, int]]:
    rows = block_rows(shape)
    for first in range(0, shape[0], rows):
        yield first, min(shape[0], first + rows)
