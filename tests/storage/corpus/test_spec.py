from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from storage.corpus.spec import HubFile, LocalFile, MixSpec, UrlFile
from tests.storage.corpus.mixes import small


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seed": -1}, "greater than or equal to 0"),
        ({"seed": "42"}, "valid integer"),
        ({"shuffle": False}, "Extra inputs"),
        ({"block": None}, "either block"),
        ({"proportions": {"rows": 1, "texts": 1}}, "not both"),
        ({"block": None, "proportions": {"rows": 1}}, "proportions are given for"),
        ({"block": None, "proportions": {"rows": 0, "texts": 1}}, "greater than or equal to 1"),
        ({"block": None, "proportions": {"rows": 65536, "texts": 1}}, "at most 65536"),
        ({"block": 65537}, "less than or equal to 65536"),
        ({"sources": []}, "at least 1"),
        ({"tokenizer": {"kind": "train", "vocab": 256, "sample_bytes": 1}}, "greater than or equal to 257"),
        ({"tokenizer": {"kind": "train", "vocab": 300, "sample_bytes": 2**31}}, "less than or equal to"),
        ({"tokenizer": {"kind": "train", "vocab": 257, "special": ["a", "b"], "sample_bytes": 1}}, "256 bytes and 2"),
        ({"tokenizer": {"kind": "train", "vocab": 300, "special": ["a", "a"], "sample_bytes": 1}}, "named twice"),
    ],
)
def test_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        small(tmp_path, **change)


@pytest.mark.parametrize("missing", ["sha256", "size", "licence", "extract"])
def test_an_unpinned_file_is_refused(tmp_path: Path, missing: str) -> None:
    fields = small(tmp_path).sources[0].files[0].model_dump()
    del fields[missing]
    with pytest.raises(ValidationError, match="Field required"):
        LocalFile.model_validate(fields)


def test_the_folder_and_the_order_of_files_are_no_part_of_the_spec(tmp_path: Path) -> None:
    here, there = small(tmp_path / "a"), small(tmp_path / "b")
    assert here != there and here.digest() == there.digest()
    fields = here.model_dump()
    both = [*fields["sources"][0]["files"], *fields["sources"][1]["files"]]
    one = MixSpec.model_validate(fields | {"sources": [{"name": "s", "files": both}]})
    other = MixSpec.model_validate(fields | {"sources": [{"name": "s", "files": both[::-1]}]})
    assert one.digest() == other.digest()
    with pytest.raises(ValidationError, match="named twice"):
        MixSpec.model_validate(fields | {"sources": [{"name": "s", "files": both + both[:1]}]})


def test_windows_paths_name_the_same_file(tmp_path: Path) -> None:
    fields = small(tmp_path).sources[0].files[0].model_dump()
    assert LocalFile.model_validate(fields | {"path": "corpus\\rows.jsonl"}).name == "rows.jsonl"


ABOUT = {"size": 1, "sha256": "a" * 64, "licence": "MIT", "extract": {"kind": "rows"}}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://someone:secret@host/a.jsonl", "no password"),
        ("https://host/a.jsonl?signature=secret", "no query"),
        ("https://host/a.jsonl#part", "no fragment"),
        ("file:///etc/passwd", "match pattern"),
        ("ftp://host/a.jsonl", "match pattern"),
        ("https://host", "match pattern"),
        ("https://host/a b.jsonl", "match pattern"),
        ("s3:///a.jsonl", "match pattern"),
    ],
)
def test_an_address_that_must_not_be_published_or_is_none(url: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        UrlFile.model_validate({"kind": "url", "url": url} | ABOUT)
    for good in ("https://host:8080/a/b.jsonl.gz", "http://host/a", "s3://bucket/a/b.parquet"):
        assert UrlFile.model_validate({"kind": "url", "url": good} | ABOUT).name == good


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "main"},
        {"revision": "A" * 40},
        {"dataset": "a/b/c"},
        {"dataset": "../b"},
        {"file": "/a"},
        {"file": "a\\b"},
        {"file": ""},
        {"file": "a\nb"},
        {"sha256": None},
    ],
)
def test_a_hub_file_that_is_not_pinned_or_none(change: dict[str, Any]) -> None:
    fields = {"kind": "hub", "dataset": "a/b", "revision": "0" * 40, "file": "data/é 1.parquet"} | ABOUT
    assert HubFile.model_validate(fields).name == f"a/b@{'0' * 40}/data/é 1.parquet"
    with pytest.raises(ValidationError, match=next(iter(change))):
        HubFile.model_validate(fields | change)
