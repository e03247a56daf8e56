"""Small corpora, written to a folder and pinned, for tests that need a mix."""

import hashlib
import io
import json
import os
import random
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from storage.corpus.extract import rows
from storage.corpus.fetch import pinned_files
from storage.corpus.manifest import Manifest
from storage.corpus.parts import Parts
from storage.corpus.prepare import prepare
from storage.corpus.read import Read
from storage.corpus.row import Row
from storage.corpus.spec import Extract, MixSpec, SourceSpec
from storage.store import Store

WORDS = "the of windows step ledger naïve ﬁne 数据 loss = x[i] + 3.14\n return\tdef 🙂 <|endoftext|> \r\n café".split(
    " "
)


def prose(seed: int, words: int) -> str:
    """Reproducible text with accents, CJK, emoji, CRLF and a special token's name in it."""
    drawn = random.Random(seed)
    return " ".join(
        drawn.choice(WORDS) + (str(drawn.randrange(1000)) if drawn.random() < 0.2 else "") for _ in range(words)
    )


def pin(path: Path, **extract: Any) -> dict[str, Any]:
    """The recipe's entry of a local file, pinned as it is now."""
    data = path.read_bytes()
    about = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {"kind": "local", "path": str(path), "licence": "CC0-1.0", "extract": extract or {"kind": "text"}, **about}


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "score": i % 5}) + "\n" for i, text in enumerate(texts)))
    return path


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A .tar or .tar.gz whose members lie in the order of `members`; the bytes of a .tar are the same each time."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def extracted(name: str, data: bytes, how: Extract) -> list[Row]:
    """The rows of a file that holds its texts itself."""
    return list(rows(name, data, how, Path("unused")))


def small(folder: Path, **changes: Any) -> MixSpec:
    """Two sources (rows of a .jsonl, members of a .tar), windows of 32 tokens, 8 to a shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = write_jsonl(folder / "rows.jsonl", [prose(i, 5 + i % 40) for i in range(120)])
    members = {f"docs/{i:02d}.txt": prose(1000 + i, 30 + i).encode() for i in range(40)}
    archive = write_tar(folder / "texts.tar", {**members, "logo.png": b"\x89PNG\xff", "docs/latin.txt": b"caf\xe9"})
    fields: dict[str, Any] = {
        "seed": 7,
        "seq_len": 31,
        "shard_windows": 8,
        "held_out_windows": 20,
        "block": 16,
        "tokenizer": {"kind": "train", "vocab": 300, "sample_bytes": 100_000},
        "sources": [
            {"name": "rows", "files": [pin(rows, kind="rows")]},
            {"name": "texts", "files": [pin(archive, kind="text", include=["docs/*.txt"])]},
        ],
    }
    return MixSpec.model_validate(fields | changes)


def collect(source: SourceSpec, cache: Path) -> tuple[list[str], dict[str, int]]:
    """(the texts of a source in canonical order, its skipped rows by reason)."""
    parts = Parts(cache / "parts-of-one-source", os.urandom(8).hex())
    texts: list[str] = []
    skipped: Counter[str] = Counter()
    for number, pinned in enumerate(pinned_files(source)):
        job = Read(parts, 0, source.name, number, pinned, cache)
        job()
        texts += parts.table(job.name)["text"].to_pylist()
        skipped.update(parts.about(job.name)["skipped"])
    return texts, dict(skipped)


def prepared(folder: Path, store: Store, **changes: Any) -> tuple[MixSpec, Manifest]:
    spec = small(folder, **changes)
    return spec, prepare(spec, folder / "cache", store)
