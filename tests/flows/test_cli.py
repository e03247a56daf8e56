"""Wrong usage is one clear message and exit code 2; every command teaches by an example."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

import kernels
from flows import checks, cli
from flows.cli import app
from storage import engine, recipe
from storage.errors import UsageError
from tests.flows.conftest import result, verbatim

COMMANDS = ("prepare", "reproduce-mix", "train", "publish", "audit", "sample", "witness", "coverage", "next")
COMMANDS += ("verify", "accuse", "dispute", "docs", "doctor", "evaluate", "score", "generate")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"]).output
    assert f"verbatim {name}" in shown.split("Example", 1)[1]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"verbatim {metadata.version('verbatim-audit-training')}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("audit", "somewhere"), "--step NUMBER or --initial"),
        (("audit", "somewhere", "--step", "1", "--initial"), "--step NUMBER or --initial"),
        (("audit", "somewhere", "--step", "-1"), "--step"),
        (("audit", "somewhere", "--initial", "--draw", "2026-11-29"), "the initial state is not drawn"),
        (("verify", "somewhere", "--replay"), "--replay needs certificates"),
        (("verify", "//[x"), "'//[x' is no address"),
        (("doctor", "--backend", "gpu"), "no backend is called 'gpu'"),
        (("doctor", "--recipe", "demo", "--backend", "reference"), "counted for the backends cpu and nvidia, not"),
        (("doctor", "--recipe", "demo", "--run", "somewhere"), "either --recipe NAME or --run ADDRESS"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    assert said in verbatim(*arguments, expect=2).stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that these must miss")
@pytest.mark.parametrize(
    "arguments",
    [("doctor",), ("audit", "somewhere", "--step", "1"), ("train", "demo", "--folder", "runs/nowhere")],
)
def test_without_a_gpu_the_nvidia_backend_is_one_clear_error(api: str, arguments: tuple[str, ...]) -> None:
    said = verbatim(*arguments, "--backend", "nvidia", expect=2).stderr
    what, cause, after = said[said.index("error: ") :].strip().splitlines()
    assert "backend 'nvidia' does not run on this machine" in what and "finds no CUDA device" in what
    assert cause.startswith("  likely cause: there is no NVIDIA GPU") and after.startswith("  next: nvidia-smi")


@pytest.mark.parametrize("name", ["train", "audit", "doctor"])
def test_help_names_every_backend(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"]).output
    assert all(backend in shown.split("--backend", 1)[1] for backend in kernels.BACKENDS)


def test_doctor_says_what_a_recipe_takes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(device_memory=lambda: 80 * 2**30)
    monkeypatch.setattr(engine, "load_backend", {"nvidia": gpu}.__getitem__)
    shown = CliRunner().invoke(app, ["doctor", "--backend", "nvidia", "--recipe", "open_1b"]).output
    assert "training: " in shown and " GB of 75.16; beside it 21.98 GB of the machine's memory" in shown
    assert "sums 12.86, codes 2.69, activations" in shown and "plan: keeps every activation" in shown


def test_a_missing_beacon_names_what_to_write(tmp_path: Path) -> None:
    said = verbatim("sample", tmp_path, "--beacon", tmp_path / "none.json", expect=11).stderr
    assert str(tmp_path) in said


@pytest.mark.slow
def test_doctor_passes_here() -> None:
    assert "every conformance vector equal" in verbatim("doctor", "--backend", "reference").stdout


def test_doctor_says_beforehand_what_a_recipe_takes_of_memory() -> None:
    found = {piece["piece"]: piece for piece in result("doctor", "--recipe", "open_1b")}
    assert list(found) == ["unit", "step", "training", "initial"]
    for piece in found.values():
        assert piece["takes"] == sum(piece["by_purpose"].values())
        assert piece["by_purpose"]["weights"] == 4 * 1_607_569_408
        assert piece["fits"] == (piece["takes"] <= piece["available"])
    assert "the gradient of one unit: fits: " in verbatim("doctor", "--recipe", "demo").stdout


def test_doctor_counts_the_processes_that_a_recipe_s_plan_asks_for(tmp_path: Path) -> None:
    """Training was told to fit, and then refused when it began."""
    plain, found = yaml.safe_load(recipe.find("demo").read_text(encoding="utf-8")), []
    for processes in (1, 3):
        plain["plan"]["processes"] = processes
        (tmp_path / "asked.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
        pieces = checks.memory(str(tmp_path / "asked.yaml"), "", "cpu")
        found.append({piece["piece"]: piece["by_purpose"] for piece in pieces})
    one, three = found
    assert three["training"]["program"] == 3 * one["training"]["program"] and "gathered" not in one["training"]
    assert three["training"]["gathered"] == one["training"]["copy"]
    assert all(one[piece] == three[piece] for piece in ("unit", "step", "initial"))


def test_a_name_that_is_not_utf_8_is_refused_and_escaped(tmp_path: Path) -> None:
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m"))
    said = verbatim("prepare", strange / "recipe.yaml", expect=2).stderr
    assert r"/\udcff\x1b[31m/recipe.yaml is not UTF-8" in said


def test_a_folder_below_one_that_is_not_utf_8_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address has no way to say it, so an audit's repetition would look elsewhere."""
    strange = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    strange.mkdir()
    monkeypatch.chdir(strange)
    with pytest.raises(UsageError, match="is not UTF-8"):
        cli._absolute("run")
