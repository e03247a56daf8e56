"""A backend that this machine does not run is one clear error: what, likely cause, next command."""

import subprocess
import sys

import pytest

from storage import engine
from storage.errors import MachineFault
from storage.provenance import PROJECT

LOAD = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
{before}
from storage.engine import load_backend
from storage.errors import UsageError
try:
    load_backend("{name}")
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("nvidia", "", ("finds no CUDA device", "no NVIDIA GPU", "nvidia-smi")),
        ("nvidia", "triton", ("triton", "Triton is not installed", "-m pip install -c constraints.txt triton")),
        ("cpu", "numba", ("numba", "a package that the backend needs", "make install")),
        ("gpu", "", ("no backend is called 'gpu'; there are: cpu, reference, nvidia",)),
    ],
)
def test_what_is_missing_is_said(name: str, missing: str, said: tuple[str, ...]) -> None:
    script = LOAD.format(name=name, before=f"sys.modules[{missing!r}] = None" if missing else "")
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(said), done.stdout + done.stderr
    assert all(piece in line for piece, line in zip(said, lines, strict=True)), lines


def test_a_wrong_fingerprint_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """No vector of the contract has one, but pieces of a step are judged by them."""
    monkeypatch.setattr(engine, "_self_test", lambda backend, report: [])
    engine.self_test("reference")
    right = engine.fingerprint
    monkeypatch.setattr(engine, "fingerprint", lambda *arguments: right(*arguments) ^ 1)
    with pytest.raises(MachineFault, match="fails 1 conformance vectors here: fingerprint"):
        engine.self_test("reference")
