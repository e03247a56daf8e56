"""The order of a source's documents, and which of them are held out: functions of the seed and the texts."""

from __future__ import annotations

import unicodedata

import numpy as np
from blake3 import blake3

from storage.corpus.keyed import key, permute, restore

MANY = 8  # texts of a source, at the least, that make up its held-out windows where they are short enough
FEW = 4096  # the least number of documents that are looked at to choose those held out


def shuffled(seed: int, source: str, count: int, purpose: str = "documents") -> np.ndarray:
    """The order of a source's documents: element p is the canonical number of the document that comes p-th; int64."""
    return permute(key(seed, purpose, source), count, np.arange(count))


def places(seed: int, source: str, count: int, numbers: np.ndarray) -> np.ndarray:
    """At which place of the order the documents with these canonical numbers come; int64, as `numbers`."""
    return restore(key(seed, "documents", source), count, numbers)


def normalised(text: str) -> str:
    """Texts that differ only in Unicode form or white space are one text.

    NFC, then each run of white space (as str.split() finds it) one space, and none at the ends.
    """
    return " ".join((text if text.isascii() else unicodedata.normalize("NFC", text)).split())


def held_out_key(seed: int) -> bytes:
    """The key of all sources' held-out digests: equal texts fall together, whichever source they are from."""
    return key(seed, "held out")


def held_out_name(secret: bytes, text: str) -> bytes:
    """The 32-byte digest by which a text is held out or not: BLAKE3 of the normalised text's UTF-8, so keyed."""
    return blake3(normalised(text).encode(), key=secret).digest()


def choose_held_out(names: np.ndarray, tokens: np.ndarray, wanted: int) -> np.ndarray:
    """Indices of the documents held out, by the smallest keyed digests of their text, until they hold `wanted` tokens.

    names: uint64[n, 4], the digests, of one source; tokens: int64[n] with the end-of-text token. Equal texts have one
    digest and fall together. Texts of more than `wanted` / MANY tokens (the longest of equal ones counts) come after
    all others, so that no few texts speak for the whole source. Empty if all texts together hold fewer than `wanted`
    tokens.
    """
    count = FEW
    while count < len(names):  # the smallest digests mostly are enough
        last = np.partition(names[:, 0], count)[count]
        among = np.nonzero(names[:, 0] <= last)[0]
        chosen, short = _choose(names[among], tokens[among], wanted)
        if short:
            return among[chosen]
        count *= 8
    return _choose(names, tokens, wanted)[0]


def _choose(names: np.ndarray, tokens: np.ndarray, wanted: int) -> tuple[np.ndarray, bool]:
    """(indices, whether texts that are short enough were enough)."""
    groups: dict[bytes, list[int]] = {}
    for index, name in enumerate(names.astype(">u8")):
        groups.setdefault(name.tobytes(), []).append(index)
    chosen: list[int] = []
    held = 0
    for long, _, members in sorted((int(tokens[m].max()) * MANY > wanted, name, m) for name, m in groups.items()):
        chosen += members
        held += int(tokens[members].sum())
        if held >= wanted:
            return np.array(sorted(chosen), dtype=np.int64), not long
    return np.empty(0, dtype=np.int64), False
