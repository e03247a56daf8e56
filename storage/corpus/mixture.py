"""Which window of which source comes i-th: integers, in constant time, for any part of the stream.

block b = i div B, slot = i mod B      of the B slots of every block, source s has counts[s]
source                                 by a permutation of the slots keyed by (seed, b)
number j = b * counts[s] + rank        rank: how many earlier slots of the block belong to s
pass = j div windows[s]                position = j mod windows[s], in order for pass 0 (the documents are shuffled
                                       already), through a permutation keyed by (seed, s, pass) afterwards
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from storage.corpus.keyed import key, permute
from storage.errors import UsageError


@dataclass(frozen=True)
class Located:
    """For each of n windows, int64[n]: its source, its number among the source's, its pass, its position (row)."""

    source: np.ndarray
    number: np.ndarray
    passes: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class Mixture:
    """names[s] has windows[s] windows and counts[s] of every block's sum(counts) slots."""

    seed: int
    names: tuple[str, ...]
    windows: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def block(self) -> int:
        return sum(self.counts)

    def locate(self, index: np.ndarray) -> Located:
        """The windows with these global indices (integers >= 0, any order)."""
        index = np.asarray(index, dtype=np.int64)
        if index.size and int(index.min()) < 0:
            raise UsageError(f"window {int(index.min())} was asked for; the stream begins at 0")
        block, slot = np.divmod(index, self.block)
        source, number = np.empty_like(index), np.empty_like(index)
        for b in np.unique(block).tolist():
            here = block == b
            slot_source, slot_rank = _slots(self.seed, self.counts, b)
            source[here] = slot_source[slot[here]]
            number[here] = b * np.array(self.counts)[source[here]] + slot_rank[slot[here]]
        passes, position = np.divmod(number, np.array(self.windows)[source])
        self._shuffle_repeats(source, passes, position)
        return Located(source, number, passes, position)

    def _shuffle_repeats(self, source: np.ndarray, passes: np.ndarray, position: np.ndarray) -> None:
        """Later passes read a source in another order; in place."""
        repeats = passes > 0
        for s, p in sorted(set(zip(source[repeats].tolist(), passes[repeats].tolist(), strict=True))):
            here = (source == s) & (passes == p)
            position[here] = permute(key(self.seed, "pass", self.names[s], p), self.windows[s], position[here])

    def begins_pass(self, source: int, number: int) -> int:
        """The first global window index of a source's pass `number`."""
        block, rank = divmod(number * self.windows[source], self.counts[source])
        slot_source, slot_rank = _slots(self.seed, self.counts, block)
        (slot,) = np.nonzero((slot_source == source) & (slot_rank == rank))[0]
        return block * self.block + int(slot)


@lru_cache(maxsize=8)
def _slots(seed: int, counts: tuple[int, ...], block: int) -> tuple[np.ndarray, np.ndarray]:
    """(source, rank) of every slot of a block, int64[B] each."""
    size = sum(counts)
    drawn = permute(key(seed, "block", block), size, np.arange(size))
    source = np.searchsorted(np.cumsum(counts), drawn, side="right")
    rank = np.empty(size, dtype=np.int64)
    for s, count in enumerate(counts):
        rank[source == s] = np.arange(count)
    return source, rank


def largest_remainder(weights: list[int], total: int) -> list[int]:
    """Integers in proportion to `weights` (>= 0, not all 0) that sum to `total`; equal remainders go to the first."""
    shares = [divmod(weight * total, sum(weights)) for weight in weights]
    counts = [whole for whole, _ in shares]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-shares[i][1], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
