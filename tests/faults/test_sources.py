"""Faults of other corpora's sources: files that change upstream, listings without an order, rows dropped in silence."""

import hashlib
import io
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flows import cli
from kernels import canonical
from storage.corpus import download
from storage.corpus.fetch import pinned_files
from storage.corpus.manifest import KEY, Manifest
from storage.corpus.prepare import prepare
from storage.corpus.spec import SourceSpec, UrlFile
from storage.errors import InputFault
from storage.store import LocalStore, MemoryStore
from storage.stream import Stream
from tests.faults.pages import BYTES, texts
from tests.file_server import CutOff, FileServer, Other, serving
from tests.storage.corpus.mixes import pin, prepared, prose, write_jsonl, write_tar

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[FileServer]:
    with serving() as started:
        yield started


def store() -> MemoryStore:
    """A fresh store."""
    return MemoryStore(os.urandom(8).hex())


def remote(server: FileServer, name: str, data: bytes) -> dict[str, Any]:
    """The file, served now, pinned as it is now."""
    server.files[name] = data
    about = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "extract": {"kind": "rows"}}
    return {"kind": "url", "url": f"{server.url}/{name}", "licence": "MIT", **about}


def rows_of(path: Path, first: int, count: int) -> bytes:
    return write_jsonl(path, [prose(first + i, 20 + i % 40) for i in range(count)]).read_bytes()


def test_a_mutable_address_serves_another_file_the_second_time(server: FileServer, tmp_path: Path) -> None:
    """A new machine, without the first one's cache, gets one error with both digests; nothing loosens the pin."""
    before, after = rows_of(tmp_path / "a", 0, 120), rows_of(tmp_path / "b", 500, 120)
    sources = [{"name": "rows", "files": [remote(server, "latest.jsonl", before)]}]
    _, manifest = prepared(tmp_path / "first", store(), sources=sources)
    assert prepared(tmp_path / "again", store(), sources=sources)[1] == manifest
    server.files["latest.jsonl"] = after
    target = store()
    with pytest.raises(InputFault) as error:
        prepared(tmp_path / "second", target, sources=sources)
    assert all(hashlib.sha256(data).hexdigest() in error.value.message for data in (before, after))
    assert target.list() == []
    assert error.value.exit_code == 11
    assert set(signature(cli.prepare).parameters) == {"recipe", "folder"}
    assert set(signature(cli.reproduce_mix).parameters) == {"recipe", "folder", "published"}
    for flag in ("verify", "ignore_digest", "force"):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            UrlFile.model_validate(sources[0]["files"][0] | {flag: False})


def test_a_listing_has_no_order_to_depend_on(server: FileServer, tmp_path: Path) -> None:
    """Files sort by name, whatever order the recipe or a data set's list has them in; no folder is ever listed."""
    files = [remote(server, f"{name}.jsonl", rows_of(tmp_path / name, 100 * i, 40)) for i, name in enumerate("bca")]
    spec, manifest = prepared(tmp_path, store(), sources=[{"name": "rows", "files": files}])
    assert [file.name[-7:] for file in spec.sources[0].files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    for number in range(1, 4):
        random.Random(number).shuffle(files)
        again = prepared(tmp_path, store(), sources=[{"name": "rows", "files": files}])[1]
        assert again.to_bytes() == manifest.to_bytes()


class Shuffled:
    """What `os.scandir` gives, in another order."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "Shuffled":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing: the real one is closed already."""


def relist(monkeypatch: pytest.MonkeyPatch, how: str) -> list[str]:
    """From now on every listing of a folder comes reversed or in a random order; returns what is listed."""
    asked: list[str] = []
    draw = random.Random(3)
    listdir, scandir = os.listdir, os.scandir

    def order(found: list[Any]) -> list[Any]:
        by_name = sorted(found, key=lambda entry: str(getattr(entry, "name", entry)))
        return by_name[::-1] if how == "reversed" else draw.sample(by_name, len(by_name))

    def listed_names(path: Any = ".") -> list[Any]:
        asked.append(str(path))
        return order(listdir(path))

    def listed_entries(path: Any = ".") -> Shuffled:
        asked.append(str(path))
        with scandir(path) as entries:
            return Shuffled(order(list(entries)))

    monkeypatch.setattr(os, "listdir", listed_names)
    monkeypatch.setattr(os, "scandir", listed_entries)
    return asked


@pytest.mark.parametrize("how", ["reversed", "random"])
def test_folders_that_list_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """glob and listdir follow the file system's order: a mix that is made, and one taken up, has the same bytes."""
    here = LocalStore(tmp_path / "here")
    prepared(tmp_path / "a", here)
    expected = {key: here.read(key) for key in here.list()}
    asked = relist(monkeypatch, how)
    elsewhere = LocalStore(tmp_path / "elsewhere")
    spec, manifest = prepared(tmp_path / "b", elsewhere)
    assert {key: elsewhere.read(key) for key in elsewhere.list()} == expected
    for key in [KEY, *(key for key in expected if key.startswith(("docs/", "windows/texts/train")))]:
        elsewhere.delete(key)
    assert prepare(spec, tmp_path / "b" / "cache", elsewhere) == manifest
    assert {key: elsewhere.read(key) for key in elsewhere.list()} == expected
    assert any(str(elsewhere.root) in folder for folder in asked)


def listed(folder: Path, entries: list[dict[str, Any]]) -> SourceSpec:
    data = canonical.dumps(entries)
    (folder / "pins.json").write_bytes(data)
    pins = {"path": str(folder / "pins.json"), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files = {"kind": "hub_files", "dataset": "a/b", "revision": "0" * 40, "licence": "MIT", "pins": pins}
    return SourceSpec.model_validate({"name": "s", "files": [files | {"extract": {"kind": "rows"}}]})


def test_a_data_sets_list_may_be_in_any_order(tmp_path: Path) -> None:
    entries = [{"file": f"{i}.parquet", "sha256": f"{i:064x}", "size": i} for i in range(12)]
    names = [file.name for file in pinned_files(listed(tmp_path, entries))]
    assert names == sorted(names)
    assert [file.name for file in pinned_files(listed(tmp_path, entries[::-1]))] == names


def manifest_of(folder: Path, **file: Any) -> Manifest:
    return prepared(folder, store(), sources=[{"name": "s", "files": [file]}], tokenizer=BYTES)[1]


def test_rows_that_are_no_document_are_counted_in_the_manifest(server: FileServer, tmp_path: Path) -> None:
    """A truncated last line, empty texts, broken JSON, other languages: reasons and numbers are under the mix root."""
    good = rows_of(tmp_path / "good", 0, 120)
    bad = b'{"text": "\\n", "score": 0}\n{"score": 0}\nnot json\n\n{"text": "caf\xe9"}\n{"text": "cut off in the m'
    whole = manifest_of(tmp_path, **remote(server, "whole.jsonl", good))
    mixed = manifest_of(tmp_path, **remote(server, "mixed.jsonl", good + bad))
    assert whole.mix.sources[0].skipped == {}
    assert mixed.mix.sources[0].skipped == {"empty": 3, "malformed": 2, "undecodable": 1}
    assert mixed.mix.sources[0].train == whole.mix.sources[0].train
    assert mixed.root != whole.root
    chosen = remote(server, "mixed.jsonl", good + bad)
    chosen["extract"] = {"kind": "rows", "where": "score > 0", "columns": {"score": "BIGINT"}}
    filtered = manifest_of(tmp_path, **chosen)
    assert filtered.mix.sources[0].skipped == {"filtered": 24 + 2 + 0, "empty": 1, "malformed": 2, "undecodable": 1}


@pytest.mark.parametrize(
    "cut", ["the line end", "the closing brace", "within the text", "within a letter", "all but {"]
)
def test_a_last_line_that_was_cut_off(tmp_path: Path, cut: str) -> None:
    """A download that broke off lost a row with a warning in a log; here the manifest says how many rows, and why."""
    good = rows_of(tmp_path / "good", 0, 120)
    last = '{"text": "the last of them, caf\u00e9", "score": 1}\n'.encode()
    at = {
        "the line end": len(last) - 1,
        "the closing brace": len(last) - 2,
        "within the text": 20,
        "within a letter": last.index("é".encode()) + 1,
        "all but {": 1,
    }[cut]
    found = []
    for name, data in (("whole", good + last), ("cut", good + last[:at]), ("without", good)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "own.jsonl"
        path.write_bytes(data)
        found.append(manifest_of(tmp_path / name, **pin(path, kind="rows")).mix.sources[0])
    whole, seen, without = found
    if cut == "the line end":
        assert seen == whole
    else:
        assert seen.skipped == {"undecodable" if cut == "within a letter" else "malformed": 1}
        assert (seen.train, seen.held_out, seen.text_bytes) == (without.train, without.held_out, without.text_bytes)
        assert whole.text_bytes > without.text_bytes and without.skipped == whole.skipped == {}


def test_line_ends_are_text_and_their_bytes_are_pinned(tmp_path: Path) -> None:
    """What a checkout with CRLF makes of a file is another file, by its digest, never the same one read otherwise."""
    members = {f"{i}.txt": f"{i:03d} one\n two\n".encode() + b"z" * i for i in range(99)}
    path = write_tar(tmp_path / "own.tar", members)
    pinned = pin(path)
    unix = manifest_of(tmp_path / "unix", **pinned).mix.sources[0]
    write_tar(path, {name: text.replace(b"\n", b"\r\n") for name, text in members.items()})
    with pytest.raises(InputFault, match="differs from its pin"):
        manifest_of(tmp_path / "stale", **pinned)
    target = store()
    sources = [{"name": "s", "files": [pin(path)]}]
    dos = prepared(tmp_path / "dos", target, sources=sources, tokenizer=BYTES)[1].mix.sources[0]
    assert dos.text_bytes == unix.text_bytes + 2 * 99
    stream = Stream.open(target)
    read = b"".join(texts(target, np.concatenate([stream.windows(0, dos.train.windows), stream.held_out()])))
    assert read.count(b"\r\n") == read.count(b"\n") > 99


NAMES = """
import json, sys
from pathlib import Path
from storage.store import MemoryStore
from tests.faults.test_sources import named
print(named(Path(sys.argv[1])).root)
"""


def named(folder: Path, encoding: str = "utf-8", glob: str = "é*.txt") -> Manifest:
    """A mix of an archive as GNU tar writes it, with names in this encoding and nothing that says so."""
    path = folder / "own.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, encoding=encoding) as tar:
        for i in range(99):
            text = prose(i, 40).encode()
            member = tarfile.TarInfo(f"é{i}.txt" if i % 3 else f"z{i}.txt")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return manifest_of(folder, **pin(path, kind="text", include=[glob]))


def test_names_are_read_alike_in_a_locale_without_their_letters(tmp_path: Path) -> None:
    """Where Python's files are ASCII, tarfile reads names as ASCII too: globs chose other members, or none."""
    place = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", NAMES, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | place, capture_output=True, text=True, check=True)
    here = named(tmp_path)
    assert done.stdout.strip() == here.root and here.mix.sources[0].skipped == {"not selected": 33}


def test_names_in_an_unknown_encoding_are_names(tmp_path: Path) -> None:
    """An archive from a Latin-1 machine ended in a UnicodeEncodeError when its index was written."""
    assert named(tmp_path, "latin-1", "*.txt").mix.sources[0].skipped == {}
    assert named(tmp_path, "latin-1", "\\xe9*.txt").mix.sources[0].skipped == {"not selected": 33}


def test_a_source_that_answers_differently_on_every_try_ends(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server behind a balancer of which every machine has another version: no loop, one error."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    file = remote(server, "a.jsonl", rows_of(tmp_path / "a", 0, 120))
    server.faults += [CutOff(100), Other(b"x" * file["size"]), CutOff(100), Other(b"y" * file["size"])]
    with pytest.raises(InputFault, match="serves another file than pinned"):
        manifest_of(tmp_path, **file)
    assert len(server.asked) == 4
