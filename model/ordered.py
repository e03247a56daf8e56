"""The ordered float32 reduction, replayed on one device: for runs recorded that way; off unless a spec asks for it.

Here, and in `model.ordered_ranks`, floats are added over an index; nowhere else. Such a sum depends on the order of its
additions, so that `Order` is part of the result: another number of replicas, shards or micro-batches gives other bits.

    micro-batches   g₀·f32(1/A) + g₁·f32(1/A) + …       of a rank, ascending
    shards          (((r₀ + r₁) + r₂) + …) · f32(1/S)    of a replica, ascending: a running sum in rank order
    replicas        ((n₀ + n₁) + (n₂ + n₃)) · f32(1/R)   recursive doubling: a balanced tree, by TreeFold

From the Open-1B report (arXiv 2609.17380): §6 and appendix A, whose Algorithm 1 `replay` follows. Every operation is
one correctly rounded float32 addition or multiplication of an element, none fused; subnormals are kept. An element only
meets the same element of other ranks, so that cutting or joining tensors changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from model import host

# How the blocks of a number of replicas that is no power of two are joined, 7 replicas being blocks of 4, 2 and 1.
# "ascending_level": the smallest blocks first, 4 + (2 + 1), as the report's appendix A.1 says.
# "left_fold": from the lowest replica on, (4 + 2) + 1, as its published code does, in its cluster and its audit.
# Both are one tree where there are at most two blocks: up to 6 replicas (its run had 6), and at 8, 9, 10 and 12.
Residual = Literal["ascending_level", "left_fold"]


@dataclass(frozen=True)
class Order:
    """All that the order of the additions depends on; raises ValueError for a count below 1 or an unknown residual."""

    replicas: int  # nodes: each holds all of the gradient
    shards: int  # ranks of a node: each ends with one share of it
    micro_batches: int  # of each rank in a step
    residual: Residual

    def __post_init__(self) -> None:
        for name in ("replicas", "shards", "micro_batches"):
            if (count := getattr(self, name)) < 1:
                raise ValueError(f"an order has {name} = {count}; at least 1 is needed")
        if self.residual not in get_args(Residual):
            raise ValueError(f"residual is {self.residual!r}; it is one of {', '.join(get_args(Residual))}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def rank(self, replica: int, shard: int) -> int:
        """Replica-major, shard-minor (appendix A)."""
        return replica * self.shards + shard


def replay(order: Order, gradient: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """The mean gradient of a step, f32 of any one shape, as the ranks of `order` reduce it (appendix A, Algorithm 1).

    gradient(rank, micro_batch) → f32 is called once for each, in mesh order: replicas, shards within, micro-batches
    within. What it returns is read only. Beside it live a rank's sum, a replica's, and those of TreeFold.
    """
    fold = TreeFold(order.replicas, order.residual)
    for replica in range(order.replicas):
        fold.push(shard_mean((_of_rank(order, gradient, order.rank(replica, s)) for s in range(order.shards)), order))
    return times_reciprocal(fold.result(), order.replicas)


def _of_rank(order: Order, gradient: Callable[[int, int], np.ndarray], rank: int) -> np.ndarray:
    return micro_batch_mean((gradient(rank, index) for index in range(order.micro_batches)), order)


def micro_batch_mean(gradients: Iterable[np.ndarray], order: Order) -> np.ndarray:
    """A rank's own mean: each gradient f32[…] times f32(1/A), then the sum in ascending order (§6; A.3).

    The published code multiplies the loss, before the backward pass, so that its gradients come scaled.
    """
    scale = reciprocal(order.micro_batches)
    return ascending_sum((np.multiply(checked(gradient), scale) for gradient in gradients), order.micro_batches)


def shard_mean(parts: Iterable[np.ndarray], order: Order) -> np.ndarray:
    """The mean over the ranks of a replica, f32[…]: the sum in ascending rank order, then times f32(1/S) (A.2; A.3)."""
    return times_reciprocal(ascending_sum(parts, order.shards), order.shards)


def ascending_sum(parts: Iterable[np.ndarray], count: int) -> np.ndarray:
    """((p₀ + p₁) + p₂) + …, f32, in a new array; starts from p₀, not from 0, which would lose a −0.

    Raises ValueError where there are not `count` parts of one shape, TypeError where one is not float32.
    """
    total, found = None, 0
    for part in parts:
        total = checked(part).copy() if total is None else float_add(total, part)
        found += 1
    if total is None or found != count:
        raise ValueError(f"an ordered sum of {count} parts was given {found}; a rank or a micro-batch is missing")
    return total


class TreeFold:
    """The tree of a recursive-doubling all-reduce over `count` replicas, from parts that come one by one (A.1).

    Two blocks of one size merge as soon as both are there, like a binary counter's carries, the lower replica on the
    left; so at most ⌈log₂ count⌉ + 1 accumulators are alive, the part that is being pushed among them.
    """

    def __init__(self, count: int, residual: Residual) -> None:
        self.count, self.residual = count, residual
        self.limit = (count - 1).bit_length() + 1  # (count - 1).bit_length() is ⌈log₂ count⌉
        self._pushed = 0
        self._blocks: list[tuple[int, np.ndarray]] = []  # (level, sum of 2^level replicas), lowest replicas first

    def push(self, part: np.ndarray) -> None:
        """Add the next replica's part, f32[…], which belongs to the fold from now on: it may be overwritten."""
        if self._pushed == self.count:
            raise ValueError(f"a fold over {self.count} replicas was given one more")
        alive, level = len(self._blocks) + 1, 0
        assert alive <= self.limit, f"{alive} accumulators are alive in a fold over {self.count}, not {self.limit}"
        while self._blocks and self._blocks[-1][0] == level:
            part, level = float_add(self._blocks.pop()[1], part), level + 1
        self._blocks.append((level, part))
        self._pushed += 1

    def result(self) -> np.ndarray:
        """The sum, f32[…]; raises ValueError before every replica's part is there. Ends the fold."""
        if self._pushed != self.count:
            raise ValueError(f"a fold over {self.count} replicas was given {self._pushed}")
        sums = [part for _, part in self._blocks]
        self._blocks.clear()
        while len(sums) > 1:
            left = 0 if self.residual == "left_fold" else len(sums) - 2
            sums[left] = float_add(sums[left], sums.pop(left + 1))
        return sums[0]


def blocks(count: int) -> list[range]:
    """The replicas of each block: consecutive powers of two, largest first, one for each bit of `count` (A.1)."""
    sizes = [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
    starts = [count >> size.bit_length() << size.bit_length() for size in sizes]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def reciprocal(count: int) -> np.float32:
    """1/count, rounded once to float32. Dividing instead rounds otherwise for about a third of values at 6 (A.3)."""
    return host.f32(Fraction(1, count))


def times_reciprocal(total: np.ndarray, count: int) -> np.ndarray:
    """The average as the report takes it, f32[…] · f32(1/count), in place (A.3)."""
    return np.multiply(checked(total), reciprocal(count), out=total)


def float_add(lower: np.ndarray, higher: np.ndarray) -> np.ndarray:
    """lower + higher, element by element, into `lower`: the only float addition over ranks in the project.

    Raises TypeError for another type than float32, ValueError for two shapes.
    """
    if checked(lower).shape != checked(higher).shape:
        raise ValueError(f"parts of an ordered sum have shapes {list(lower.shape)} and {list(higher.shape)}")
    return np.add(lower, higher, out=lower)


def checked(part: np.ndarray) -> np.ndarray:
    """The same array; raises TypeError where it is not float32."""
    if part.dtype != np.float32:
        raise TypeError(f"an ordered sum adds float32, and was given {part.dtype}")
    return part
