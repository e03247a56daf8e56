"""Checkpoints: whole or absent, every bit proven against the ledger, damage named by tensor, leaf and rows."""

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from kernels import canonical
from kernels.digest import leaf_rows
from storage import checkpoint
from storage.errors import CheckpointFault, Divergence, InputFault, LedgerFault, VerbatimError
from storage.ledger import part_key
from tests.storage import small
from tests.storage.conftest import Small, flip

PIECES = 1 + len(checkpoint.state_shapes(small.spec().model))  # of a part: its header, and each tensor


def manifest(made: Small, step: int) -> checkpoint.Manifest:
    return checkpoint.load_manifest(made.store, made.run().ledger, step)


def part_path(made: Small, step: int) -> Path:
    return made.store.path(checkpoint.object_key(manifest(made, step).parts[0].digest))


def load(made: Small, step: int) -> Any:
    return checkpoint.load(made.store, made.run().ledger, step)


def test_save_and_load(made: Small) -> None:
    assert checkpoint.steps(made.store) == [0, 5, 10, 12]
    for step in (0, 5, 10, 12):
        state = load(made, step)
        assert (state.step, state.windows) == (step, min(step, 8) * 2 + max(step - 8, 0) * 3)
        assert all(tensor.flags.writeable and tensor.dtype == np.float32 for tensor in state.tensors().values())


def test_parts_are_safetensors_without_metadata(made: Small) -> None:
    data = part_path(made, 5).read_bytes()
    tensors = load_safetensors(data)
    state = load(made, 5).tensors()
    assert tensors.keys() == state.keys()
    assert all(np.array_equal(tensors[name], state[name]) for name in state)
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert b"__metadata__" not in header and len(header) % 8 == 0


def test_small_parts(made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load(made, 5)
    monkeypatch.setattr(checkpoint, "PART_BYTES", 10_000)
    made.store.path(checkpoint.checkpoint_key(5)).unlink()
    saved = checkpoint.save(made.store, made.run().ledger, state)
    assert len(saved.parts) > 5 and max(len(part.tensors) for part in saved.parts) > 1
    assert load(made, 5).tensors().keys() == state.tensors().keys()


def test_saving_twice_changes_nothing(made: Small) -> None:
    before = made.store.list()
    checkpoint.save(made.store, made.run().ledger, load(made, 10))
    assert made.store.list() == before


def test_a_state_that_the_ledger_does_not_know_is_not_saved(made: Small) -> None:
    state = load(made, 10)
    state.weights["head"][0, 0] += 1
    before = made.store.list()
    with pytest.raises(Divergence, match="no checkpoint was written"):
        checkpoint.save(made.store, made.run().ledger, state)
    assert made.store.list() == before


def test_flipped_bit_names_tensor_leaf_and_rows(made: Small) -> None:
    path = part_path(made, 10)
    state, start = load(made, 10).tensors(), int.from_bytes(path.read_bytes()[:8], "little") + 8
    names = list(state)
    before = sum(state[name].nbytes for name in names[: names.index("weights/head")])
    rows = leaf_rows(state["weights/head"].shape, 4)
    assert rows == 256 and state["weights/head"].shape == (300, 64)
    flip(path, start + before + 290 * 64 * 4 + 3)
    with pytest.raises(CheckpointFault, match=r"tensor weights/head, leaf 1 \(rows 256 to 299\)") as caught:
        load(made, 10)
    assert caught.value.exit_code == 11
    assert f"rm {checkpoint.checkpoint_key(10)} objects/{path.name}" in str(caught.value)


def test_flipped_bit_anywhere_in_header_leaves_or_manifest(made: Small) -> None:
    found = manifest(made, 10)
    leaves = made.store.path(checkpoint.object_key(found.leaves))
    document = made.store.path(checkpoint.checkpoint_key(10))
    places = [(part_path(made, 10), position) for position in (0, 3, 7, 8, 40, 200)]
    places += [(leaves, position) for position in (0, leaves.stat().st_size // 2, leaves.stat().st_size - 1)]
    places += [(document, position) for position in range(0, document.stat().st_size, 97)]
    for path, position in places:
        good = path.read_bytes()
        flip(path, position)
        with pytest.raises(CheckpointFault):
            load(made, 10)
        path.write_bytes(good)
    load(made, 10)


def edited(made: Small, change: Callable[[dict[str, Any]], object]) -> None:
    path = made.store.path(checkpoint.checkpoint_key(10))
    document = canonical.loads(path.read_bytes())
    change(document)
    path.write_bytes(canonical.dumps(document))


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "other step": lambda d: d.update(step=11),
    "other run": lambda d: d.update(run="0" * 64),
    "scalar": lambda d: d["scalars"].update(tokens=d["scalars"]["tokens"] + 1),
    "scalar missing": lambda d: d["scalars"].pop("windows"),
    "tensor missing": lambda d: d["tensors"].pop("m/head"),
    "tensor renamed": lambda d: d["tensors"].update({"m/hood": d["tensors"].pop("m/head")}),
    "part missing": lambda d: d["parts"].clear(),
    "part names another object": lambda d: d["parts"][0].update(digest=d["leaves"]),
    "part names nothing": lambda d: d["parts"][0].update(digest="0" * 64),
    "part leaves the store": lambda d: d["parts"][0].update(digest="../../../../etc/passwd"),
    "part out of order": lambda d: d["parts"][0]["tensors"].reverse(),
    "leaves missing": lambda d: d.update(leaves="0" * 64),
    "unknown field": lambda d: d.update(note=""),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_manifest(made: Small, name: str) -> None:
    edited(made, EDITS[name])
    with pytest.raises(CheckpointFault):
        load(made, 10)


def test_shortened_and_lengthened_part(made: Small) -> None:
    path = part_path(made, 10)
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"\0", b"", data[:100]):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointFault, match="bytes, expected"):
            load(made, 10)


def test_manifest_of_unreasonable_size(made: Small) -> None:
    made.store.path(checkpoint.checkpoint_key(10)).write_bytes(b"[" * (checkpoint.MAX_MANIFEST + 1))
    with pytest.raises(InputFault, match="at most"):
        load(made, 10)


def test_ledger_cut_off_before_a_checkpoint(made: Small) -> None:
    for step in (10, 11):
        made.store.path(part_key(step)).unlink()
    with pytest.raises(LedgerFault, match="ends after 10 steps, but state 12 exists"):
        load(made, 12)


def test_half_written_higher_checkpoint_is_invisible(made: Small) -> None:
    (made.store.root / "checkpoints" / ".tmp-99-abc").write_bytes(b"{")
    (made.store.root / "checkpoints" / "00000099").mkdir()
    made.store.create("objects/" + "0" * 64, b"half")
    assert checkpoint.steps(made.store) == [0, 5, 10, 12]


def test_damaged_newest_checkpoint_stops_training_and_says_how_to_go_on(made: Small) -> None:
    expected = made.run().ledger.head
    path = part_path(made, 12)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointFault) as caught:
        made.train()
    (command,) = (line for line in str(caught.value).splitlines() if "rm " in line)
    for key in command.partition("rm ")[2].partition(" and")[0].split():
        made.store.path(key).unlink()
    result = made.train()
    assert result.validated == (10, 11) and result.head == expected
    assert checkpoint.steps(made.store) == [0, 5, 10, 12]


@pytest.mark.parametrize("writes", [0, PIECES // 2, PIECES, PIECES + 1, PIECES + 2])
def test_killed_while_saving(begun: Small, writes: int) -> None:
    """Kill in each object of a checkpoint, half of a piece written; the last begins the next. What is whole goes on."""
    whole = writes == PIECES + 2
    begun.train(until=4)
    child = os.fork()
    if child == 0:
        _die_while_saving(begun, writes)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert checkpoint.steps(begun.store) == ([0, 4, 5] if whole else [0, 4])
    recorded = len(begun.run().ledger)  # steps went on while the checkpoint was written
    assert recorded >= (10 if whole else 5)
    result = begun.train()
    assert result.validated == tuple(range(5 if whole else 4, recorded)) and result.outcome == "finished"


def _die_while_saving(begun: Small, writes: int) -> None:
    """Let `writes` pieces of the next checkpoint be written (its part's, the leaves, the manifest), then die in one."""
    real, left = os.write, writes

    def write(file: int, data: Any) -> int:
        nonlocal left
        if b"storage/checkpoint.py" in _callers():
            if left == 0:
                real(file, bytes(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return real(file, data)

    os.write = write
    begun.train()
    os._exit(0)


def _callers() -> bytes:
    return b" ".join(frame.filename.encode() for frame in traceback.extract_stack())


def test_disk_full_while_training_is_one_error(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    begun.train(until=4)
    before = begun.store.list()
    monkeypatch.setattr(os, "fsync", denied)
    with pytest.raises(VerbatimError):
        begun.train()
    monkeypatch.undo()
    assert [key for key in begun.store.list() if not key.startswith("segments/")] == [
        key for key in before if not key.startswith("segments/")
    ]
