"""Checkpoints elsewhere were half there, changed after they were saved, or had other bytes each time; copies were
damaged, and nobody looked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.state import State
from storage import checkpoint, local
from storage.errors import InputFault, MissingObject
from storage.objects import Data, pieces
from storage.publish import publish
from storage.release import RELEASE_KEY
from storage.saving import Saver
from storage.store import LocalStore, MemoryStore
from tests.storage import small
from tests.storage.conftest import Small

ROOT = Path(__file__).resolve().parents[2]
OFFSETS = 10


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Twelve steps, with checkpoints 0, 5, 10 and 12."""
    made = Small(tmp_path_factory.mktemp("trained"))
    with small.stand_in():
        small.begin(made.folder, made.store, made.mix)
        made.train()
    return made


@pytest.fixture
def made(trained: Small, tmp_path: Path) -> Small:
    """A copy that a test may go on with."""
    shutil.copytree(trained.folder, tmp_path / "made")
    return Small(tmp_path / "made")


def without(made: Small, step: int) -> None:
    """Take checkpoint `step` and what is only its own away, as if it had never been saved."""
    kept = set()
    for number in checkpoint.steps(made.store):
        manifest = checkpoint.load_manifest(made.store, made.run().ledger, number)
        if number != step:
            kept |= {manifest.leaves, *(part.digest for part in manifest.parts)}
    made.store.delete(checkpoint.checkpoint_key(step))
    for key in made.store.list("objects/"):
        if key.partition("/")[2] not in kept:
            made.store.delete(key)


def in_a_child(work: Callable[[], object]) -> int:
    """Do the work in a fork; the signal that ended it."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def killed_at(byte: int, work: Callable[[], object]) -> None:
    """Do the work, and die by SIGKILL when so many bytes have been written to files."""
    real, left = os.write, byte

    def write(file: int, data: Any) -> int:
        nonlocal left
        if len(data) > left:
            real(file, bytes(data)[:left])
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(data)
        return real(file, data)

    os.write = write
    work()


@pytest.mark.parametrize("tenth", range(OFFSETS))
def test_killed_at_any_byte_of_a_save(made: Small, tenth: int) -> None:
    """Saving was not atomic; it was mended once, and lost again when the code was moved."""
    ledger, before = made.run().ledger, everything(made.store)
    state = checkpoint.load(made.store, ledger, 12)
    without(made, 12)
    size = sum(len(data) for key, data in before.items() if key not in made.store.list())
    byte = size * tenth // OFFSETS
    assert in_a_child(lambda: killed_at(byte, lambda: checkpoint.save(made.store, ledger, state))) == signal.SIGKILL
    assert checkpoint.steps(made.store) == [0, 5, 10]
    checkpoint.check(made.store, ledger, 10)
    checkpoint.save(made.store, ledger, state)
    assert everything(made.store) == before


class Slow(LocalStore):
    """Gives the process up where a chosen object is to be written, as one whose disk is too slow to be waited for."""

    def __init__(self, root: Path, patience: int) -> None:
        super().__init__(root)
        self.patience = patience

    def create(self, key: str, data: Data) -> bool:
        if self.patience == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.patience -= 1
        return super().create(key, data)

    def delete(self, key: str) -> None:
        raise AssertionError(f"{key} was deleted")


@pytest.mark.parametrize("patience", [0, 1, 2])
def test_what_was_durable_stays_until_the_new_is(made: Small, patience: int) -> None:
    """`latest` moved, and the old checkpoint was deleted, before the new one was on the disk. Here nothing points,
    nothing is deleted, and the manifest comes after what it names."""
    ledger = made.run().ledger
    state = checkpoint.load(made.store, ledger, 12)
    without(made, 12)
    before = everything(made.store)
    assert in_a_child(lambda: checkpoint.save(Slow(made.store.root, patience), ledger, state)) == signal.SIGKILL
    assert checkpoint.steps(made.store) == [0, 5, 10] and before.items() <= everything(made.store).items()


def test_parts_are_durable_before_the_manifest_has_a_name(made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of the disk: each file is synced before it is linked, its folder after, the manifest last of all."""
    ledger = made.run().ledger
    state, done = checkpoint.load(made.store, ledger, 12), list[str]()
    without(made, 12)
    sync, link = os.fsync, os.link

    def synced(file: int) -> None:
        done.append("folder" if Path(f"/proc/self/fd/{file}").resolve().is_dir() else "file")
        sync(file)

    def linked(source: str, name: str, **options: Any) -> None:
        done.append(name)
        link(source, name, **options)

    monkeypatch.setattr(local.os, "fsync", synced)
    monkeypatch.setattr(local.os, "link", linked)
    manifest = checkpoint.save(made.store, ledger, state)
    names = [*(part.digest for part in manifest.parts), manifest.leaves, "00000012.json"]
    assert [name for name in done if name not in ("file", "folder")] == names
    for name in names:
        at = done.index(name)
        assert (done[at - 1], done[at + 1]) == ("file", "folder"), name


@pytest.mark.parametrize("odd", ["99", "00000099", "00000099.json", ".tmp-00000099.json", "checkpoint-99.json"])
def test_only_a_whole_manifest_is_a_checkpoint(made: Small, odd: str) -> None:
    """Any folder whose name was a number counted as a checkpoint, and the highest was taken."""
    folder = made.store.root / "checkpoints" / odd
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    assert checkpoint.steps(made.store) == [0, 5, 10, 12]
    with small.stand_in():
        assert made.train().first_step == 12


def test_a_state_that_goes_on_changes_no_saved_checkpoint(made: Small) -> None:
    """Saving returned before it had copied the state, and the next step's weights went into the file."""
    ledger = made.run().ledger
    state = checkpoint.load(made.store, ledger, 12)
    without(made, 12)
    going = threading.Event()

    def write(copy: State) -> None:
        assert going.wait(20)
        checkpoint.save(made.store, ledger, copy)

    with Saver(write, beside=True) as saver:
        saver.save(state)
        for tensor in state.tensors().values():
            tensor += np.float32(1)
        state.step, state.tokens = state.step + 1, state.tokens + 1
        going.set()
    checkpoint.check(made.store, ledger, 12)


def test_equal_states_have_equal_bytes_however_they_lie_in_memory(made: Small, tmp_path: Path) -> None:
    """Files held addresses and unordered sets, so that equal states had other bytes each time."""
    ledger, found = made.run().ledger, list[dict[str, bytes]]()
    for number, form in enumerate((np.ascontiguousarray, np.asfortranarray, spread_out)):
        state = checkpoint.load(made.store, ledger, 12).placed(form)
        for group in (state.weights, state.m, state.v):
            turned = dict(sorted(group.items(), reverse=number == 1))
            group.clear()
            group.update(turned)
        store = LocalStore(tmp_path / str(number))
        checkpoint.save(store, ledger, state)
        found.append(everything(store))
    assert found[0] == found[1] == found[2]
    assert found[0].items() <= everything(made.store).items()


def spread_out(array: np.ndarray) -> np.ndarray:
    """The same values, every other one of a larger array."""
    larger = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    larger[..., ::2] = array
    return larger[..., ::2]


ENCODED = """
    import numpy as np
    from storage.checkpoint import _encode
    from storage.store import object_digest
    names = {"m/a", "m/b", "weights/ä", "weights/c"}
    tensors = {name: np.full((3, 5), len(name), np.float32) for name in names}
    found = set()
    for turn in range(7):
        mixed = dict(sorted(tensors.items(), key=lambda item: hash((item[0], turn))))
        found.add(object_digest(_encode(sorted(names), mixed)))
    print(*found, hash("m/a"))
"""


def test_no_order_of_a_hash_table_is_in_a_file() -> None:
    """The order of metadata was random, so files could not be verified again. Ours have none, and sorted names."""
    said = []
    for seed in ("0", "1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", textwrap.dedent(ENCODED)]
        said.append(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True))
    digests, hashes = ({done.stdout.split()[part] for done in said} for part in (0, 1))
    assert len(digests) == 1 and len(hashes) == 3 and all(len(done.stdout.split()) == 2 for done in said)


def test_a_listing_is_never_remembered(tmp_path: Path) -> None:
    """A cached listing did not show what another process had written since, or showed its old size."""
    here = LocalStore(tmp_path)
    here.create("checkpoints/00000001.json", b"one")
    assert here.list() == ["checkpoints/00000001.json"] and checkpoint.steps(here) == [1]
    assert in_a_child(lambda: LocalStore(tmp_path).create("checkpoints/00000002.json", b"two")) == 0
    assert checkpoint.steps(here) == [1, 2] and here.size("checkpoints/00000002.json") == 3
    assert in_a_child(lambda: LocalStore(tmp_path).delete("checkpoints/00000001.json")) == 0
    assert checkpoint.steps(here) == [2]
    with pytest.raises(MissingObject):
        here.read("checkpoints/00000001.json")


class Faulty(MemoryStore):
    """A target that says of every object that it was stored, and keeps of some of them something else."""

    def __init__(self, name: str, keeps: Callable[[bytes], bytes | None], prefix: str) -> None:
        super().__init__(name)
        self.keeps, self.prefix = keeps, prefix

    def create(self, key: str, data: Data) -> bool:
        kept = self.keeps(b"".join(pieces(data))) if key.startswith(self.prefix) else data
        return super().create(key, kept) if kept is not None else True


KEPT: dict[str, Callable[[bytes], bytes | None]] = {
    "nothing": lambda data: None,
    "an error's text": lambda data: b"<Error><Code>InternalError</Code></Error>",
    "a middle of zeros": lambda data: data[:20] + bytes(len(data) - 40) + data[-20:],
    "its beginning": lambda data: data[:-1],
}


@pytest.mark.parametrize("prefix", ["ledger/", "objects/", "mix/"])
@pytest.mark.parametrize("kept", KEPT)
def test_an_upload_that_was_said_to_succeed_is_read_back(made: Small, tmp_path: Path, kept: str, prefix: str) -> None:
    """An upload's end was answered by 200 with an error inside; a file had its size, and blocks of NUL bytes."""
    target = Faulty(str(tmp_path), KEPT[kept], prefix)
    with pytest.raises(InputFault):
        publish(made.store, made.mix, target, made.key)
    assert RELEASE_KEY not in target.list()


def everything(store: LocalStore) -> dict[str, bytes]:
    """Every object of a store."""
    return {key: store.read(key) for key in store.list()}
