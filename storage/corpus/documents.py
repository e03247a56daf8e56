"""The documents of one source in canonical order, what was skipped and why, and the choice of held-out documents."""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from storage.corpus.extract import rows
from storage.corpus.fetch import pinned_files, read_pinned
from storage.corpus.keyed import key, permute
from storage.corpus.spec import SourceSpec
from storage.errors import InputFault

MANY = 8  # texts of a source, at the least, that make up its held-out windows where they are short enough


@dataclass
class Documents:
    """Texts by (file name, member name, position); file[i] indexes `files`."""

    files: list[str]
    texts: list[str] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    member: list[str] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0

    def __len__(self) -> int:
        return len(self.texts)


def collect(source: SourceSpec, cache: Path, tell: Callable[[int, int], None] = lambda done, total: None) -> Documents:
    """Every document of the source; InputFault if a file differs from its pin or nothing is left to train on."""
    pins = pinned_files(source)
    documents = Documents([pin.name for pin in pins])
    for number, pin in enumerate(pins):
        data = read_pinned(pin, cache)
        for row in rows(pin.name, data, pin.extract, cache):
            if row.text is None:
                documents.skipped[row.reason] = documents.skipped.get(row.reason, 0) + 1
                continue
            documents.texts.append(row.text)
            documents.file.append(number)
            documents.member.append(row.member)
            documents.position.append(row.position)
            documents.text_bytes += len(row.text.encode())
        tell(number + 1, len(pins))
    if not documents.texts:
        raise InputFault(
            f"source {source.name} has no documents; skipped rows: {documents.skipped or 'none'}",
            cause="the files are empty, or the globs, the column or the filter select nothing",
            next_step=f"look at the files of {source.name} and correct the recipe",
        )
    return documents


def shuffled(seed: int, source: str, count: int, purpose: str = "documents") -> np.ndarray:
    """The order of a source's documents: element p is the canonical number of the document that comes p-th; int64."""
    return permute(key(seed, purpose, source), count, np.arange(count))


def normalised(text: str) -> str:
    """Texts that differ only in Unicode form or white space are one text."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def choose_held_out(seed: int, texts: list[str], tokens: np.ndarray, wanted: int) -> np.ndarray:
    """Indices of the documents held out, by the smallest keyed digests of their text, until they hold `wanted` tokens.

    texts: str[n]; tokens: int[n] with the end-of-text token. Equal texts have one digest and fall together. Texts of
    more than `wanted` / MANY tokens come last, so that no few texts speak for the whole source.
    Empty if all texts together hold fewer than `wanted` tokens.
    """
    secret = key(seed, "held out")
    groups: dict[bytes, list[int]] = {}
    for index, text in enumerate(texts):
        groups.setdefault(blake3(normalised(text).encode(), key=secret).digest(), []).append(index)
    chosen: list[int] = []
    held = 0
    for _, _, members in sorted((int(tokens[m].max()) * MANY > wanted, name, m) for name, m in groups.items()):
        chosen += members
        held += int(tokens[members].sum())
        if held >= wanted:
            return np.array(sorted(chosen), dtype=np.int64)
    return np.empty(0, dtype=np.int64)
