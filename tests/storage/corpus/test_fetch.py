import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storage.corpus.fetch import read_pinned
from storage.corpus.spec import HubFiles, LocalFile, PyPIFile
from storage.errors import InputFault, MissingObject, Refused, StorageError, VerbatimError
from tests.storage.corpus.mixes import pin


def local(path: Path) -> LocalFile:
    return LocalFile.model_validate(pin(path))


def test_a_changed_file_is_an_error_that_shows_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")
    pinned = local(path)
    assert read_pinned(pinned, tmp_path) == b"before"
    for changed in (b"beforf", b"befor", b"before and after", b""):
        path.write_bytes(changed)
        with pytest.raises(InputFault) as error:
            read_pinned(pinned, tmp_path)
        assert pinned.sha256 in error.value.message and f"{len(changed)} bytes" in error.value.message
        assert error.value.exit_code == 11 and error.value.cause and error.value.next_step


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    pinned = local(tmp_path / "a")
    (tmp_path / "a").unlink()
    with pytest.raises(MissingObject, match="there is no"):
        read_pinned(pinned, tmp_path)


def package(**changes: Any) -> PyPIFile:
    fields = {"kind": "pypi", "package": "some==1.0", "format": "wheel", "licence": "MIT", "extract": {"kind": "text"}}
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of b"x"
    return PyPIFile.model_validate(fields | {"sha256": digest, "size": 1} | changes)


def run_as(monkeypatch: pytest.MonkeyPatch, output: str, code: int, data: bytes = b"x") -> list[list[str]]:
    """Let pip succeed or fail without a network; returns the commands it was given."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if code == 0:
            folder = Path(command[-1])
            folder.mkdir()
            (folder / "some-1.0-py3-none-any.whl").write_bytes(data)
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_package_is_fetched_once_and_verified_on_every_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_as(monkeypatch, "", 0)
    assert read_pinned(package(), tmp_path / "cache") == b"x"
    assert read_pinned(package(), tmp_path / "cache") == b"x"
    assert len(calls) == 1
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes", "--no-cache-dir", "--only-binary"} <= set(calls[0])
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"y")
    with pytest.raises(InputFault, match="differs from its pin") as error:
        read_pinned(package(), tmp_path / "cache")
    assert "downloaded anew" in error.value.next_step


def test_an_index_that_serves_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "0" * 64
    run_as(
        monkeypatch, f"ERROR: THESE PACKAGES DO NOT MATCH\n  Expected sha256 {'a' * 64}\n     Got        {other}\n", 1
    )
    with pytest.raises(InputFault) as error:
        read_pinned(package(), tmp_path)
    assert other in error.value.message and package().sha256 in error.value.message


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, "WARNING: retrying\nERROR: No matching distribution found for some==1.0\n", 1)
    with pytest.raises(VerbatimError, match="No matching distribution") as error:
        read_pinned(package(), tmp_path)
    assert error.value.exit_code == 1 and "no network" in error.value.cause
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_and_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", 1)
    with pytest.raises(StorageError, match="No space left on device") as error:
        read_pinned(package(), tmp_path)
    assert "free some space" in error.value.next_step and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"some==1\.0 wheel could not be stored in .*file"):
        read_pinned(package(), tmp_path / "file" / "cache")


def test_a_hub_data_set_is_refused_until_its_files_are_pinned(tmp_path: Path) -> None:
    fields = {"kind": "hub", "dataset": "a/b", "revision": "0" * 40, "licence": "MIT", "extract": {"kind": "rows"}}
    with pytest.raises(Refused, match="a/b at commit 000000000000 cannot be prepared"):
        read_pinned(HubFiles.model_validate(fields), tmp_path)
