"""The whole chain by its commands: prepare, train with a killed segment, publish, draw, audit, verify."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from storage.account import account
from storage.figures import probe_key
from storage.ledger import part_key
from storage.store import open_store
from tests.flows import tiny
from tests.flows.conftest import ROOT, command, result, segment_processes, verbatim
from tests.tasks.test_process import gone

REFERENCE = ("--backend", "reference")


def test_a_killed_segment_is_repeated_and_compared(folder: Path) -> None:
    found = account(open_store(str(folder / "run")))
    assert found.steps == tiny.STEPS
    assert found.validated and set(found.validated) <= {4, 5, 6, 7}
    assert set(found.held_out) == {0, 4, 8, 12}


@pytest.mark.slow
def test_audits_of_the_initial_state_and_of_a_drawn_step_match(folder: Path, tmp_path: Path) -> None:
    published, records = folder / "published", tmp_path / "records"
    beacon = tmp_path / "beacon.json"
    beacon.write_text(json.dumps({"round": 1, "scheme": "file", "value": "07" * 32}, separators=(",", ":")))
    again = [result("sample", published, "--beacon", beacon, "--count", "2", "--records", records) for _ in range(2)]
    assert again[0] == again[1] and len(again[0]["steps"]) == 2
    step = again[0]["steps"][0]
    by_draw = ("--step", str(step), "--draw", again[0]["date"])
    initial = result("audit", published, "--initial", *REFERENCE, "--records", records)
    drawn = result("audit", published, *by_draw, *REFERENCE, "--records", records)
    assert (initial["verdict"], drawn["verdict"]) == ("match", "match")
    said = result("verify", published, initial["certificate"], drawn["certificate"])
    assert [line["says"].split(",")[0] for line in said] == ["initial match", f"step {step} match"]
    assert len(result("verify", published)) == 2
    assert [piece["fits"] for piece in result("doctor", "--run", published)] == [True] * 4


@pytest.mark.slow
def test_a_changed_certificate_is_an_input_fault(folder: Path, tmp_path: Path) -> None:
    audited = result("audit", folder / "published", "--initial", *REFERENCE, "--records", tmp_path)
    path = Path(audited["certificate"])
    path.write_bytes(path.read_bytes().replace(b'"verdict":"match"', b'"verdict":"watch"'))
    assert "certificate" in verbatim("verify", folder / "published", path, expect=11).stderr


@pytest.mark.slow
def test_nothing_to_compare_with_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert result("audit", tmp_path / "empty", "--initial", *REFERENCE, expect=13)["verdict"] == "refused"
    assert "steps 0 to 11" in result("audit", folder / "published", "--step", "12", *REFERENCE, expect=13)["detail"]


@pytest.mark.slow
def test_a_changed_ledger_is_an_input_fault_that_names_the_entry(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "published"
    shutil.copytree(folder / "published", copy)
    part = copy / part_key(3)
    before, field, digest = part.read_bytes().partition(b'"batch":"')
    part.write_bytes(before + field + (b"0" if digest[:1] != b"0" else b"1") + digest[1:])
    found = result("audit", copy, "--step", "3", *REFERENCE, expect=11)
    assert found["verdict"] == "input-fault" and "3" in found["detail"]


@pytest.mark.slow
def test_publishing_again_changes_nothing_and_another_target_works(folder: Path, tmp_path: Path) -> None:
    verbatim("publish", folder)
    verbatim("publish", folder, "--target", f"file://{tmp_path / 'elsewhere'}")
    first, second = (root / "RELEASE.json" for root in (folder / "published", tmp_path / "elsewhere"))
    assert first.read_bytes() == second.read_bytes()


def test_a_mix_of_another_recipe_is_refused(folder: Path, recipe: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text(encoding="utf-8").replace("held_out_windows: 16", "held_out_windows: 15"))
    assert "prepared from another recipe" in verbatim("train", other, "--folder", folder, expect=13).stderr


def test_training_without_windows_names_the_command_that_makes_them(recipe: Path, tmp_path: Path) -> None:
    assert f"verbatim prepare {recipe}" in verbatim("train", recipe, "--folder", tmp_path, expect=13).stderr


@pytest.mark.slow
def test_a_run_killed_before_its_last_held_out_loss_gets_it(folder: Path, recipe: Path, tmp_path: Path) -> None:
    for part in ("mix", "run"):
        shutil.copytree(folder / part, tmp_path / part)
    last = tmp_path / "run" / probe_key(tiny.STEPS)
    expected = last.read_bytes()
    last.unlink()  # as if it had died between this and the checkpoint
    verbatim("train", recipe, "--folder", tmp_path, *REFERENCE)
    assert last.read_bytes() == expected


@pytest.mark.slow
def test_nobody_is_left_when_the_whole_flow_is_killed(folder: Path, recipe: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mix", tmp_path / "mix")
    train = subprocess.Popen(command("train", recipe, "--folder", tmp_path, *REFERENCE), cwd=ROOT)
    limit = time.monotonic() + 60
    while not (children := segment_processes(train.pid)) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(train.pid, signal.SIGKILL)
    train.wait()
    assert children and all(gone(pid, 30) for pid in children)
    verbatim("train", recipe, "--folder", tmp_path, *REFERENCE)
    ours, theirs = (account(open_store(str(root / "run"))) for root in (tmp_path, folder))
    assert ours.trajectory_root == theirs.trajectory_root
