"""Which window of which source comes i-th: integers, in constant time, for any part of the stream.

block b = i div B, slot = i mod B      of the B slots of every block, source s has counts[s]
source                                 of permute(key(seed, "block", b), B, slot): the first counts[0] values are the
                                       first source's, the next counts[1] the second's, and so on, in the spec's order
number j = b * counts[s] + rank        rank: how many earlier slots of the block belong to s
pass = j div windows[s]                position = j mod windows[s], in order for pass 0 (the documents are shuffled
                                       already); then permute(key(seed, "pass", names[s], pass), windows[s], position)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from storage.corpus.keyed import key, permute, restore
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

    def find(self, source: int, number: np.ndarray) -> np.ndarray:
        """The global indices of a source's windows with these running numbers (integers >= 0); int64, as `number`."""
        block, rank = np.divmod(np.asarray(number, dtype=np.int64), self.counts[source])
        slot = np.empty_like(block)
        for b in np.unique(block).tolist():
            here = block == b
            slot[here] = np.nonzero(_slots(self.seed, self.counts, b)[0] == source)[0][rank[here]]
        return block * self.block + slot

    def begins_pass(self, source: int, number: int) -> int:
        """The first global window index of a source's pass `number`."""
        return int(self.find(source, np.array([number * self.windows[source]]))[0])

    def in_pass(self, source: int, position: np.ndarray, number: int) -> np.ndarray:
        """The global indices under which a source's rows `position` come in its pass `number`; int64, as `position`."""
        count = self.windows[source]
        if number:
            position = restore(key(self.seed, "pass", self.names[source], number), count, position)
        return self.find(source, number * count + np.asarray(position, dtype=np.int64))


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
