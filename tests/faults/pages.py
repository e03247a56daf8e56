"""A corpus whose windows are known without any code of ours: a document of 31 letters and its end are one window.

Its tokenizer knows single bytes alone. Documents begin with a number of six digits, by which they are told apart.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from storage.corpus.manifest import Manifest
from storage.store import Store
from tests.storage.corpus.mixes import pin, prepared, write_jsonl

WIDTH = 32  # tokens of a window
HELD_OUT = 16  # windows, and documents
BYTES = {"kind": "train", "vocab": 257, "sample_bytes": 1}


def page(number: int) -> str:
    return f"{number:06d} the page of this number".ljust(WIDTH - 1, ".")


def pages(folder: Path, store: Store, count: int, **changes: Any) -> Manifest:
    """A mix of one source with `count` training windows, each a document of its own, and 16 held out."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_jsonl(folder / "pages.jsonl", [page(i) for i in range(count + HELD_OUT)])
    sources = [{"name": "pages", "files": [pin(path, kind="rows")]}]
    fields: dict[str, Any] = {"held_out_windows": HELD_OUT, "tokenizer": BYTES, "sources": sources}
    manifest = prepared(folder, store, **(fields | changes))[1]
    assert manifest.mix.sources[0].train.windows == count and manifest.mix.sources[0].train.tail == 0
    return manifest


def _byte_letters() -> dict[str, bytes]:
    """Byte-level BPE writes a byte as the letter of that number if that can be seen, else as one from 256 on."""
    seen = [byte for byte in range(256) if 0x21 <= byte < 0x7F or (byte >= 0xA1 and byte != 0xAD)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): bytes([byte]) for byte in seen} | {chr(256 + n): bytes([byte]) for n, byte in enumerate(unseen)}


def texts(store: Store, windows: np.ndarray) -> list[bytes]:
    """What each window of a mix of single bytes holds: its end-of-text tokens as NUL."""
    vocab = json.loads(store.read("tokenizer.json"))["model"]["vocab"]
    letters = _byte_letters() | {"<|endoftext|>": b"\0"}
    of = {number: letters[letter] for letter, number in vocab.items()}
    return [b"".join(of[i] for i in window) for window in windows.tolist()]


def numbers(store: Store, windows: np.ndarray) -> list[int]:
    """The number of the page that each window is."""
    read = texts(store, windows)
    found = [int(text[:6]) for text in read]
    assert [text.decode() for text in read] == [page(number) + "\0" for number in found]
    return found
