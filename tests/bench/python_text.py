"""Text that every machine with Python has: the sources of its standard library, NumPy, PyTorch and SymPy, as tokens.

Its limits: it is Python alone, easier than prose; which files there are depends on the machine and its versions, so
losses compare only within one data digest; held-out files are whole files of the same packages, so that their style,
imports and licence headers were seen in training. Files of equal bytes count once; near copies are not looked for.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PACKAGES = ("numpy", "sympy", "torch")
VOCAB = 8192
SAMPLE_BYTES = 10_000_000  # that the tokenizer learns from
HELD_OUT = 40  # one file in so many is held out, by its digest
END = "<|endoftext|>"
BATCH = 256  # files encoded at a time
Encode = Callable[[list[bytes]], np.ndarray]


class Corpus(NamedTuple):
    """Windows int32[N, S + 1] without overlap, in the order of the files."""

    train: np.ndarray
    held_out: np.ndarray
    vocab: int
    tokenizer: str
    size: int  # bytes of text
    digest: str  # of the windows, 16 hex digits


def corpus(seq_len: int, held_out_windows: int, files: int | None = None) -> Corpus:
    """The text as windows; `files` takes that many files alone, for a trial."""
    texts = list(distinct(sources()))[:files]
    draws = [int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % HELD_OUT for text in texts]
    train = [text for text, draw in zip(texts, draws, strict=True) if draw]
    held = [text for text, draw in zip(texts, draws, strict=True) if not draw]
    encode, vocab, name = tokenizer(train)
    windows = [cut(encode(part), seq_len + 1) for part in (train, held)]
    windows[1] = windows[1][:held_out_windows]
    if min(map(len, windows)) == 0:
        raise SystemExit(f"{len(train)} files to train on and {len(held)} held out fill no window of {seq_len + 1}")
    digest = hashlib.sha256(windows[0].tobytes() + windows[1].tobytes()).hexdigest()[:16]
    return Corpus(windows[0], windows[1], vocab, name, sum(map(len, texts)), digest)


def sources() -> Iterator[Path]:
    """Python files by folder, then path."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & set(path.relative_to(library).parts):
            yield path
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found and found.origin:
            yield from sorted(Path(found.origin).parent.rglob("*.py"))


def distinct(paths: Iterable[Path]) -> Iterator[bytes]:
    """Contents, each once; empty files are left out."""
    seen = {b""}
    for path in paths:
        text = path.read_bytes()
        if text not in seen:
            seen.add(text)
            yield text


def tokenizer(texts: list[bytes]) -> tuple[Encode, int, str]:
    """(texts to tokens, vocabulary, name): byte-level BPE learnt from an even sample of the texts, or bytes."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        return plain_bytes, 512, "bytes"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    every = max(1, round(sum(map(len, texts)) / SAMPLE_BYTES))
    bpe.train_from_iterator((text.decode("utf-8", "replace") for text in texts[::every]), trainer)

    def encode(parts: list[bytes]) -> np.ndarray:
        found: list[int] = []
        for first in range(0, len(parts), BATCH):
            batch = [part.decode("utf-8", "replace") for part in parts[first : first + BATCH]]
            for encoding in bpe.encode_batch_fast(batch, add_special_tokens=False):
                found += [*encoding.ids, 0]  # the one special token
        return np.array(found, np.int32)

    return encode, VOCAB, f"byte-level BPE of {VOCAB}"


def plain_bytes(texts: list[bytes]) -> np.ndarray:
    """A token for each byte, and 256 after each text."""
    return np.concatenate([np.append(np.frombuffer(text, np.uint8).astype(np.int32), 256) for text in texts])


def cut(tokens: np.ndarray, length: int) -> np.ndarray:
    """Whole windows [N, length]; the rest is dropped."""
    return tokens[: len(tokens) // length * length].reshape(-1, length).astype(np.int32)
