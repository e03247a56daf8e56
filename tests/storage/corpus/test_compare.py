import os
from pathlib import Path
from typing import Any

import pytest

from storage.corpus import extract
from storage.corpus.compare import first_difference
from storage.corpus.extract import Row
from storage.corpus.prepare import TOKENIZER
from storage.store import MemoryStore
from storage.stream import Stream
from tests.storage.corpus.mixes import pin, prepared, small


def made(folder: Path, **changes: Any) -> Stream:
    store = MemoryStore(os.urandom(8).hex())
    prepared(folder, store, **changes)
    return Stream.open(store)


def with_text(change: str) -> Any:
    """An extractor with a fault: one text of the archive comes out with `change` at its end."""
    honest = extract.rows

    def rows(*args: Any) -> Any:
        for row in honest(*args):
            altered = row.member == "docs/07.txt" and row.text is not None
            yield Row(row.member, row.position, f"{row.text}{change}") if altered else row

    return rows


def test_equal_mixes(tmp_path: Path) -> None:
    assert first_difference(made(tmp_path / "a"), made(tmp_path / "b")) == ""


def test_another_spec(tmp_path: Path) -> None:
    recorded = made(tmp_path / "a")
    assert first_difference(recorded, made(tmp_path / "b", block=17)) == "spec.block: 16 and 17"
    other = small(tmp_path / "c").sources[0].files[0].model_dump()
    sources = [{"name": "rows", "files": [other]}, {"name": "texts", "files": [pin(tmp_path / "c" / "texts.tar")]}]
    found = first_difference(recorded, made(tmp_path / "c", sources=sources))
    assert found.startswith("spec.sources[1].files[0].extract.include")


def test_another_extraction_names_source_window_and_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    (tmp_path / "tokenizer.json").write_bytes(recorded.store.read(TOKENIZER))
    about = pin(tmp_path / "tokenizer.json")
    pinned = {"kind": "pinned", **{name: about[name] for name in ("path", "sha256", "size")}}
    recorded = made(tmp_path / "a", tokenizer=pinned)
    monkeypatch.setattr("storage.corpus.documents.rows", with_text("!"))
    rebuilt = made(tmp_path / "a", tokenizer=pinned)
    found = first_difference(recorded, rebuilt)
    assert found.startswith("source texts, train window ") and "texts.tar docs/07.txt 0" in found
    row = int(found.split("window ")[1].split(" ")[0])
    one, other = (stream._train[1].all_leaves() for stream in (recorded, rebuilt))
    assert [a == b for a, b in zip(one, other, strict=False)].index(False) == row


def test_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    monkeypatch.setattr("storage.corpus.documents.rows", with_text(" zqzqzq" * 1000))
    rebuilt = made(tmp_path / "a")
    digests = [stream.manifest.mix.tokenizer.digest for stream in (recorded, rebuilt)]
    assert first_difference(recorded, rebuilt) == f"tokenizer: {digests[0]} and {digests[1]}"
