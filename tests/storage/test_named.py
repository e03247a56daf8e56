"""Files that a person names: nothing endless is read, nothing is waited for."""

import os
from pathlib import Path

import pytest

from storage import recipe as recipes
from storage.audit.beacon import read_beacon
from storage.corpus.fetch import read_pinned
from storage.corpus.spec import LocalFile, Text
from storage.errors import StorageError, UsageError
from storage.named import read_file


@pytest.fixture(params=["pipe", "device", "folder", "endless", "loop"])
def strange(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "strange.yaml"
    match request.param:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "endless":
            path.touch()
            os.truncate(path, 1 << 42)
        case "loop":
            path.symlink_to(path)
    return path


def test_the_error_is_a_sentence(strange: Path) -> None:
    with pytest.raises(OSError) as caught:
        read_file(strange, 100)
    assert caught.value.strerror and str(caught.value.filename) == str(strange)


def test_as_a_recipe_a_beacon_or_a_source(strange: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        recipes.load(strange)
    with pytest.raises(UsageError, match="cannot be read"):
        read_beacon(strange)
    pin = LocalFile(kind="local", path=str(strange), licence="CC0", extract=Text(), size=3, sha256="0" * 64)
    with pytest.raises(Exception, match=r"strange\.yaml") as caught:
        read_pinned(pin, tmp_path)
    assert isinstance(caught.value, StorageError) or "differs from its pin" in str(caught.value)


def test_a_regular_file_up_to_the_limit(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"abc")
    link.symlink_to(path)
    assert read_file(path, 3) == read_file(link, 3) == b"abc"
    with pytest.raises(OSError, match="it holds 3 bytes, at most 2 are allowed"):
        read_file(path, 2)
