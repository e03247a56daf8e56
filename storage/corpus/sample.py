"""Stage "tokenizer": a sample of all sources in proportion to their bytes, and the tokenizer trained on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from storage.corpus.documents import shuffled
from storage.corpus.numbering import Numbered, lengths
from storage.corpus.parts import Parts
from storage.corpus.read import taken
from storage.corpus.spec import TrainTokenizer
from storage.corpus.tokens import TOKENIZER_PART, train


@dataclass(frozen=True)
class Train:
    """Train on rows of pieces of texts; the order of the texts plays no part."""

    parts: Parts
    spec: TrainTokenizer
    rows: tuple[tuple[str, np.ndarray], ...]
    size: int

    def finished(self) -> bool:
        return self.parts.finished(TOKENIZER_PART)

    def __call__(self) -> None:
        """Raises what `train` does."""
        data = train(self.spec, self._texts())
        self.parts.write(TOKENIZER_PART, {"json": data.decode()})

    def _texts(self) -> Iterator[str]:
        for part, rows in self.rows:
            for chunk in taken(self.parts.table(part).select(["text"]), rows)["text"].chunks:
                yield from chunk.to_pylist()


def sample(parts: Parts, spec: TrainTokenizer, seed: int, sources: Sequence[Numbered]) -> Train:
    """Whole documents in a keyed order of their own, from each source until its share of the bytes is reached."""
    total = sum(source.text_bytes for source in sources)
    rows: list[tuple[str, np.ndarray]] = []
    for source in sources:
        share = spec.sample_bytes * source.text_bytes // total
        rows += _of_source(parts, seed, source, share)
    return Train(parts, spec, tuple(rows), min(total, spec.sample_bytes))


def _of_source(parts: Parts, seed: int, source: Numbered, share: int) -> Iterator[tuple[str, np.ndarray]]:
    sizes = np.concatenate([lengths(parts, file)[file.kept] for file in source.files])
    order = shuffled(seed, source.source, source.count, "tokenizer sample")
    reached = np.searchsorted(np.cumsum(sizes[order]), share) + 1 if share else 0
    chosen = np.sort(order[:reached])
    for file in source.files:
        low, high = np.searchsorted(chosen, [file.first, file.first + file.count]).tolist()
        if low < high:
            yield file.part, file.kept[chosen[low:high] - file.first]
