"""The last weights as plain code takes them: the checkpoint's bytes, and a program that knows nothing of us."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save_file

from kernels import reference
from kernels.reference.products import product_f32
from model.transformer import forward, network
from storage import checkpoint, engine
from storage.assembled import Assembled, Assembly, Span
from storage.audit.release import check_release
from storage.code_archive import pack, source_files
from storage.errors import CheckpointFault, InputFault, UsageError
from storage.figures import load_probe
from storage.publish import publish
from storage.run import Run, create_run
from storage.store import LocalStore, MemoryStore, object_digest
from storage.training import train_segment
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.test_release import signed

# Root mean square of the logits' differences, over that of the logits: what int8 codes, 254 to a row's range, and
# bfloat16 between operations leave of a model of one layer; 0.0024 was measured.
LOGITS = 0.01
GAP = 0.002  # nats between float32 and the integers' products on so small a model; 0.00014 was measured

# A stranger's: nothing of ours can be imported, whatever is installed beside torch, and nothing unpickled.
STRANGER = """
import importlib.abc, json, runpy, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flows", "tasks", "storage", "model", "kernels", "tests"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, Nothing())
import pickle, torch  # torch imports it; nobody may use it
pickle.load = pickle.loads = pickle.Unpickler = None
"""
LOSS = """
import pathlib, torch
from safetensors.torch import load_file
program = runpy.run_path(sys.argv[1] + "/load.py")
with torch.inference_mode():
    model, windows = program["Model"].load(pathlib.Path(sys.argv[1])), load_file(sys.argv[2])["windows"]
    loss, logits = model.loss(windows), model.logits(windows[:, :-1])
print(json.dumps([loss, sorted(name for name in sys.modules if name in ("numba", "pydantic", "blake3"))]))
"""
SAVE = """
from safetensors.torch import save_file  # which needs NumPy, as loading does not
save_file({"logits": logits}, "logits.safetensors")
"""
SAY = """
sys.argv = [sys.argv[1] + "/load.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def stranger(script: str, *arguments: object, folder: Path) -> str:
    """What a script prints that has torch and the exported files alone."""
    command = [sys.executable, "-c", STRANGER + script, *map(str, arguments)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_weights_are_the_last_checkpoints(made: Small) -> None:
    run = made.run()
    found = load_safetensors(made.published.read("export/model.safetensors"))
    expected = checkpoint.load(made.store, run.ledger, 12).weights
    assert found.keys() == expected.keys() == run.spec.model.shapes().keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert [array.dtype for array in found.values()] == [np.dtype("float32")] * len(found)
    config = json.loads(made.published.read("export/config.json"))
    assert (config["run"], config["step"], config["state_root"]) == (run.ledger.run_id, 12, run.ledger.state_root(12))
    assert config["attention_windows"] == [16] and config["norm_eps"] == 1e-05
    assert made.published.read("export/tokenizer.json") == made.mix.read("tokenizer.json")
    assert made.published.read("export/load.py") == source_files()["storage/plain_model.py"]


def test_weights_of_more_than_one_file(begun: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "PART_BYTES", 100_000)
    begun.train()
    publish(begun.store, begun.mix, begun.published, begun.key)
    names = [f"export/model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [key for key in begun.published.list("export/model")] == names
    found = [load_safetensors(begun.published.read(name)) for name in names]
    expected = checkpoint.load(begun.store, begun.run().ledger, 12).weights
    assert {name: array.tobytes() for part in found for name, array in part.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
    assert check_release(begun.published).body.classes["export"].count == 6


def test_a_run_without_a_checkpoint_has_no_export(begun: Small) -> None:
    body = publish(begun.store, begun.mix, begun.published, begun.key).release
    assert body.classes["export"].count == 0 and check_release(begun.published).body == body


def test_damaged_weights_are_not_exported(made: Small) -> None:
    manifest = checkpoint.load_manifest(made.store, made.run().ledger, 12)
    flip(made.store.path(checkpoint.object_key(manifest.parts[-1].digest)), -5)
    with pytest.raises(CheckpointFault, match=r"has digest .*, checkpoint 12 demands"):
        publish(made.store, made.mix, LocalStore(made.folder / "target"), made.key)
    assert not (made.folder / "target").exists()


@pytest.mark.parametrize("key", ["model.safetensors", "config.json", "tokenizer.json", "load.py"])
def test_another_export_than_the_checkpoint_and_the_code_give(made: Small, key: str) -> None:
    flip(made.published.path(f"export/{key}"), -9)
    with pytest.raises(
        InputFault, match=rf"lists \w+ under export/{key}, the last checkpoint and the code give \w{{64}}"
    ):
        check_release(signed(made))
    made.published.path(f"export/{key}").unlink()
    with pytest.raises(InputFault, match=f"lists nothing under export/{key}"):
        check_release(signed(made))


def test_a_program_that_the_code_does_not_hold(made: Small) -> None:
    """The archive without it is another code, so it can't be left out to publish any program."""
    body = check_release(made.published).body
    files = {name: data for name, data in source_files().items() if name != "storage/plain_model.py"}
    made.published.path(f"code/{body.code}.tar").write_bytes(pack(files))
    with pytest.raises(InputFault, match="its code is"):
        check_release(signed(made))


def test_every_range_of_what_is_put_together() -> None:
    store = MemoryStore("spans")
    store.create("a", bytes(range(100)))
    pieces = (b"head", Span(store, "a", 10, 20), b"", Span(store, "a", 90, 10), Span(store, "a", 0, 0), b"t")
    whole = b"head" + bytes(range(10, 30)) + bytes(range(90, 100)) + b"t"
    made = Assembled("put together", {"x": Assembly(pieces, object_digest(whole))})
    assert made.size("x") == len(whole) and made.read("x", made.digests["x"]) == whole
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert made.read_range("x", start, stop - start) == whole[start:stop]
    with pytest.raises(InputFault, match="holds 35 bytes"):
        made.read_range("x", 30, 6)
    with pytest.raises(InputFault, match="there is no y"):
        made.read("y")
    for write in (lambda: made.create("y", b""), lambda: made.delete("x")):
        with pytest.raises(UsageError, match="can only be read"):
            write()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A run of the real model, by the backend that compiles nothing."""
    made = Small(tmp_path_factory.mktemp("real"))
    stream, backend = small.mix(made.folder / "sources", made.mix), engine.load_backend("reference")
    create_run(made.store, stream, small.spec(), made.key.public, backend)
    train_segment(made.run(), "reference", checkpoint_every=12, diagnostics_every=12)
    publish(made.store, made.mix, made.published, made.key)
    return made


def test_plain_code_has_the_runs_held_out_loss(real: Small, tmp_path: Path) -> None:
    """Close, not equal: the run multiplies int8 codes and keeps bfloat16 between operations."""
    run, published = real.run(), real.published.root
    save_file({"windows": run.stream.held_out().astype(np.int64)}, tmp_path / "windows.safetensors")
    loss, ours = json.loads(stranger(LOSS, published / "export", tmp_path / "windows.safetensors", folder=tmp_path))
    recorded, first = (load_probe(real.store, run.ledger, step).mean() for step in (12, 0))
    assert recorded is not None and first is not None and not ours
    print(f"held-out loss {recorded} by the run, {loss} by plain code; {first} before training")
    assert abs(loss - float(recorded)) < GAP < float(first) - float(recorded)


def training_logits(run: Run) -> np.ndarray:
    """float32[windows, seq_len, vocab] of the held-out windows, by the forward that trains."""
    weights, flag = checkpoint.load(run.store, run.ledger, 12).weights, reference.new_flag()
    net = network(run.spec, reference, weights, flag)
    rows = [forward(net, window[:-1].astype(np.int64), flag, keep=False).rows for window in run.stream.held_out()]
    return np.stack([product_f32(x, net.weight("head", flag)) for x in rows])


def test_plain_codes_logits_are_the_training_forwards(real: Small, tmp_path: Path) -> None:
    run = real.run()
    save_file({"windows": run.stream.held_out().astype(np.int64)}, tmp_path / "windows.safetensors")
    stranger(LOSS + SAVE, real.published.root / "export", tmp_path / "windows.safetensors", folder=tmp_path)
    plain, ours = load_safetensors((tmp_path / "logits.safetensors").read_bytes())["logits"], training_logits(run)
    assert plain.shape == ours.shape == (16, 16, 300)
    error = float(
        np.sqrt(np.square(plain.astype(np.float64) - ours).mean() / np.square(ours.astype(np.float64)).mean())
    )
    print(f"logits differ by {error:.5f} of their size")
    assert 0 < error < LOGITS


def test_plain_code_goes_on_with_a_text(real: Small, tmp_path: Path) -> None:
    said = stranger(SAY, real.published.root / "export", "verbs7 ver", folder=tmp_path)
    assert said.startswith("verbs7 ver") and len(said) > len("verbs7 ver\n")


def test_the_program_is_short_and_needs_three_packages_of_which_the_model_needs_two() -> None:
    text = source_files()["storage/plain_model.py"].decode()
    assert len(text.splitlines()) <= 140
    for indent, expected in (("", {"torch", "safetensors"}), ("    ", {"tokenizers"})):
        lines = [line.split() for line in text.splitlines() if line.startswith((f"{indent}import ", f"{indent}from "))]
        imported = {line[1].partition(".")[0] for line in lines}
        assert imported - set(sys.stdlib_module_names) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing PyTorch on a busy machine
def test_the_export_runs_in_a_fresh_environment(real: Small, tmp_path: Path) -> None:
    """torch and safetensors load the model and have its losses; tokenizers, and a text goes on. Versions as
    `constraints.txt` has them."""
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    constraints = Path(__file__).parents[2] / "constraints.txt"
    install = [python, "-m", "pip", "install", "-q", "-c", constraints]
    subprocess.run([*install, "torch", "safetensors"], check=True)
    save_file({"windows": real.run().stream.held_out().astype(np.int64)}, tmp_path / "windows.safetensors")
    asked = ["-I", "-c", STRANGER + LOSS, real.published.root / "export", tmp_path / "windows.safetensors"]
    done = subprocess.run([python, *asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    probe = load_probe(real.published, real.run().ledger, len(real.run().ledger))
    assert abs(json.loads(done.stdout)[0] - float(probe.mean() or 0)) < GAP
    subprocess.run([*install, "tokenizers"], check=True)
    command = [python, "-I", real.published.root / "export" / "load.py", "verbs7 ver"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("verbs7 ver"), done.stderr
    assert not list(python.parent.parent.rglob("site-packages/numpy"))
