"""Data sets of the hub, from the list of their files to windows."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernels import canonical
from storage.corpus import download, hub
from storage.corpus.manifest import Manifest
from storage.errors import InputFault, VerbatimError
from storage.store import MemoryStore
from tests.file_server import CutOff, FileServer, Status, serving
from tests.storage.corpus.mixes import prepared, prose, write_jsonl

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).resolve().parents[3]
BASE = f"datasets/some/set/resolve/{COMMIT}/"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    """A hub with one set: rows in three files of three formats, and a page about them."""
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    texts = [prose(i, 5 + i % 40) for i in range(120)]
    lines = write_jsonl(tmp_path / "x.jsonl", texts).read_bytes().splitlines(keepends=True)
    pq.write_table(pa.Table.from_pylist([json.loads(line) for line in lines[80:]]), tmp_path / "x.parquet")
    with serving() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        started.files[BASE + "data/a%20b.jsonl"] = b"".join(lines[:40])
        started.files[BASE + "data/b.jsonl.zst"] = pa.compress(b"".join(lines[40:80]), "zstd", asbytes=True)
        started.files[BASE + "data/c.parquet"] = (tmp_path / "x.parquet").read_bytes()
        started.files[BASE + "README.md"] = "# Téxts\n".encode() * 1000
        yield started


def test_a_list_of_pins(server: FileServer) -> None:
    """Over all pages, in the order of names; what is kept in git is digested here."""
    found = canonical.loads(hub.list_files("some/set", COMMIT, ["*"]))
    expected = sorted((name.removeprefix(BASE).replace("%20", " "), data) for name, data in server.files.items())
    assert found == [
        {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for name, data in expected
    ]
    some = canonical.loads(hub.list_files("some/set", COMMIT, ["data/*.parquet", "*.zst"]))
    assert [entry["file"] for entry in some] == ["data/b.jsonl.zst", "data/c.parquet"]


def test_a_set_that_is_not_there(server: FileServer) -> None:
    with pytest.raises(VerbatimError, match=f"/api/datasets/no/set/tree/{COMMIT}.*: the server answers 404"):
        hub.list_files("no/set", COMMIT, ["*"])


def test_a_hub_that_fails_while_it_is_asked(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault, said in ((CutOff(10), "10 of 9000 bytes came"), (Status(500), "the server answers 500")):
        server.faults.append(fault)  # at README.md
        with pytest.raises(VerbatimError, match=said):
            hub.list_files("some/set", COMMIT, ["*"])
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(VerbatimError, match="no connection, or it broke"):
        hub.list_files("some/set", COMMIT, ["*"])


@pytest.mark.parametrize(
    "answer", [[1], [{"type": "file", "path": "a", "lfs": {}}], {"error": "x"}, None, [{"path": "a"}]]
)
def test_a_hub_that_answers_what_it_should_not(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(hub, "read_page", lambda page, token: (answer, None))
    with pytest.raises(VerbatimError, match="in an unknown form"):
        hub.list_files("some/set", COMMIT, ["*"])


def test_the_token_and_the_list_stay_at_the_hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for elsewhere in ("file:///etc/passwd", f"{server.url}0/x", "http://127.0.0.2/x"):
        monkeypatch.setattr(hub, "read_page", lambda page, token, e=elsewhere: (asked.append(page) or [], e))
        with pytest.raises(VerbatimError, match="at another host"):
            hub.list_files("some/set", COMMIT, ["*"])
    assert len(asked) == 3


def test_the_command_that_lists(server: FileServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "storage.corpus.hub"]
    result = subprocess.run([*command, "some/set", COMMIT, "data/*"], capture_output=True, cwd=ROOT, check=True)
    assert result.stdout == hub.list_files("some/set", COMMIT, ["data/*"])
    assert hashlib.sha256(result.stdout).hexdigest().encode() in result.stderr
    failed = subprocess.run([*command, "no/set", COMMIT, "*"], capture_output=True, cwd=ROOT, check=False)
    assert failed.returncode == 1 and failed.stderr.startswith(b"error: ") and failed.stdout == b""


def mix(tmp_path: Path, store: MemoryStore, **changes: Any) -> Manifest:
    """A mix of that set, whose pins were listed at first."""
    tmp_path.mkdir(exist_ok=True)
    if not (tmp_path / "pins.json").exists():
        (tmp_path / "pins.json").write_bytes(hub.list_files("some/set", COMMIT, ["data/*"]))
    data = (tmp_path / "pins.json").read_bytes()
    pins = {"path": str(tmp_path / "pins.json"), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    about = {"kind": "hub_files", "dataset": "some/set", "revision": COMMIT, "licence": "MIT", "pins": pins}
    return prepared(
        tmp_path, store, sources=[{"name": "rows", "files": [about | {"extract": {"kind": "rows"}} | changes]}]
    )[1]


def test_the_windows_are_those_of_the_same_rows_in_a_local_file(server: FileServer, tmp_path: Path) -> None:
    store, server.faults = MemoryStore(os.urandom(8).hex()), [CutOff(100), Status(500), CutOff(9)]
    manifest = mix(tmp_path / "hub", store)
    local = prepared(tmp_path / "local", MemoryStore(os.urandom(8).hex()))[1]
    assert not server.faults
    found, expected = manifest.mix.sources[0], local.mix.sources[0]
    assert found.text_bytes == expected.text_bytes
    assert found.train.documents + found.held_out.documents == 120
    again = mix(tmp_path / "hub", MemoryStore(os.urandom(8).hex()))
    assert again == manifest


def test_a_file_that_changed_upstream_stops_everything_before_anything_is_written(
    server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "pins.json").write_bytes(hub.list_files("some/set", COMMIT, ["data/*"]))
    before = server.files[BASE + "data/c.parquet"]
    server.files[BASE + "data/c.parquet"] = after = before[:-1] + b"!"
    with pytest.raises(InputFault) as error:
        mix(tmp_path, store := MemoryStore(os.urandom(8).hex()))
    assert all(hashlib.sha256(data).hexdigest() in error.value.message for data in (before, after))
    assert store.list() == []
