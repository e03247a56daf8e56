"""One small run, trained and published once; each test gets a copy that it may damage."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from storage.audit.keys import Key, load_or_create_key
from storage.publish import publish
from storage.run import Run, open_release, open_run
from storage.store import LocalStore
from storage.stream import Stream
from storage.training import SegmentResult, train_segment
from tests.storage import small


@dataclass(frozen=True)
class Small:
    """The folders of a small run."""

    folder: Path

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "run")

    @property
    def mix(self) -> LocalStore:
        return LocalStore(self.folder / "mix")

    @property
    def published(self) -> LocalStore:
        return LocalStore(self.folder / "published")

    @property
    def opened(self) -> LocalStore:
        return LocalStore(self.folder / "published" / "opened")

    @property
    def key(self) -> Key:
        return load_or_create_key(self.folder / "keys", "trainer")

    def run(self) -> Run:
        return open_run(self.store, Stream.open(self.mix))

    def release(self) -> Run:
        return open_release(self.published)

    def train(self, until: int | None = None, every: int = 5) -> SegmentResult:
        return train_segment(self.run(), "cpu", until, checkpoint_every=every, diagnostics_every=4)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """A killed process needs no fsync to be survived, only a dead machine does; the store's own tests keep it.

    Not by monkeypatch: asked for this early, it would undo what a test patches only after stand_in() has ended.
    """
    with mock.patch("os.fsync", lambda file: None):
        yield


@pytest.fixture
def stand_in() -> Iterator[None]:
    with small.stand_in():
        yield


@pytest.fixture(scope="session")
def _original(tmp_path_factory: pytest.TempPathFactory) -> Small:
    made = Small(tmp_path_factory.mktemp("small"))
    with small.stand_in():
        small.begin(made.folder, made.store, made.mix)
        made.train()
        publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.fixture
def made(_original: Small, tmp_path: Path, stand_in: None) -> Small:
    """A trained and published run: 12 steps, checkpoints 0, 5, 10 and 12."""
    shutil.copytree(_original.folder, tmp_path / "made")
    return Small(tmp_path / "made")


@pytest.fixture
def begun(_original: Small, tmp_path: Path, stand_in: None) -> Small:
    """The same run before its first step."""
    shutil.copytree(_original.folder / "mix", tmp_path / "begun" / "mix")
    shutil.copytree(_original.folder / "keys", tmp_path / "begun" / "keys")
    shutil.copytree(_original.folder / "run", tmp_path / "begun" / "run", ignore=_only_header)
    return Small(tmp_path / "begun")


def _only_header(folder: str, names: list[str]) -> list[str]:
    if Path(folder).name == "ledger":
        return [name for name in names if name != "header.json"]
    return [name for name in names if name not in ("ledger", "recipe.yaml")]
