"""Runs that are cancelled, doubled, killed with their worker or left by their server: by real processes and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from storage.account import account
from storage.ledger import part_key
from storage.store import open_store
from tests.flows import tiny
from tests.flows.conftest import verbatim
from tests.tasks.test_process import gone
from tests.ui.served import Served, until

pytestmark = pytest.mark.ui
LATEST = 60.0  # seconds in which a cancelled run's processes must be gone, on a busy machine


@pytest.fixture(scope="module")
def mix(served: Served, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a prepared run, to be copied by whoever trains it."""
    folder = tmp_path_factory.mktemp("prepared")
    assert served.finished(served.run("prepare/prepare", recipe=str(recipe), folder=str(folder))) == "COMPLETED"
    return folder


@pytest.fixture(scope="module")
def undisturbed(served: Served, mix: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The trajectory root of a run that nobody disturbs."""
    folder = begun(mix, tmp_path_factory.mktemp("undisturbed"))
    assert served.finished(train(served, recipe, folder)) == "COMPLETED"
    return account(open_store(str(folder / "run"))).trajectory_root


def begun(mix: Path, folder: Path) -> Path:
    shutil.copytree(mix / "mix", folder / "mix")
    return folder


def train(served: Served, recipe: Path, folder: Path) -> str:
    return served.run("train/train", recipe=str(recipe), folder=str(folder), backend="reference")


def children(served: Served, folder: Path) -> list[int]:
    """The training processes of a run, whoever their parents are by now."""
    return [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if f'"{folder}/run"'.encode() in _command(path) and b"tasks.segment" in _command(path)
    ]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def in_step(served: Served, folder: Path, step: int) -> list[int]:
    """Wait until the step is recorded; the training processes."""
    until(f"step {step} is recorded", lambda: (folder / "run" / part_key(step)).exists())
    return until("a training process", lambda: children(served, folder))


def send(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        os.kill(pid, number)


def asked_to_end(process: int) -> bool:
    """Whether SIGTERM waits for a stopped process."""
    status = Path(f"/proc/{process}/status").read_text()
    pending = re.search(r"^ShdPnd:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return pending is not None and bool(int(pending[1], 16) >> (signal.SIGTERM - 1) & 1)


def told(served: Served, run: str, pattern: str) -> bool:
    """Whether a line of the run's log, as the server has it, matches."""
    logs = served.call("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    return any(re.search(pattern, line["message"]) for line in logs)


def trained(served: Served, run: str, folder: Path) -> str:
    assert served.finished(run) == "COMPLETED"
    found = account(open_store(str(folder / "run")))
    assert found.steps == tiny.STEPS
    return found.trajectory_root


def test_cancelling_ends_the_processes_within_seconds_and_keeps_a_whole_state(
    served: Served, mix: Path, recipe: Path, tmp_path: Path, undisturbed: str
) -> None:
    folder = begun(mix, tmp_path)
    run = train(served, recipe, folder)
    training = in_step(served, folder, 1)
    send(training, signal.SIGSTOP)  # so that it is not done before it is asked to end
    began = time.monotonic()
    served.call("POST", f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    until("training is asked to end", lambda: all(map(asked_to_end, training)))
    send(training, signal.SIGCONT)
    assert all(gone(pid, LATEST) for pid in training)
    print(f"cancelled: processes gone after {time.monotonic() - began:.1f} s")
    assert served.finished(run) == "CANCELLED"
    steps = account(open_store(str(folder / "run"))).steps
    saved = sorted((folder / "run" / "checkpoints").iterdir())
    assert steps < tiny.STEPS and f"{steps:08d}" in saved[-1].name  # of the very step that was recorded last
    assert trained(served, train(served, recipe, folder), folder) == undisturbed


def test_two_trainings_of_one_run_do_not_coexist(served: Served, mix: Path, recipe: Path, tmp_path: Path) -> None:
    """One from the UI, one from a terminal, which no limit of a deployment keeps apart."""
    folder = begun(mix, tmp_path)
    run = train(served, recipe, folder)
    training = in_step(served, folder, 1)
    send(training, signal.SIGSTOP)  # so that it is not done before the other has begun
    said = verbatim("train", recipe, "--folder", folder, "--backend", "reference", expect=13).stderr
    send(training, signal.SIGCONT)
    assert "this run is being trained by process" in said
    second = train(served, recipe, folder)
    until("the second waits its turn", lambda: served.call("GET", f"/flow_runs/{second}")["state_name"] != "Scheduled")
    assert len(children(served, folder)) <= 1
    trained(served, run, folder)
    trained(served, second, folder)


def test_a_killed_workers_run_is_taken_over_and_repeats_nothing_that_was_finished(
    served: Served, mix: Path, recipe: Path, tmp_path: Path, undisturbed: str
) -> None:
    folder = begun(mix, tmp_path)
    run = train(served, recipe, folder)
    training = in_step(served, folder, 6)
    before = {key: (folder / "run" / key).stat().st_mtime_ns for key in map(part_key, range(4))}
    workers, engines = (served.processes(words) for words in ("prefect --no-prompt worker", "prefect.engine"))
    began = time.monotonic()
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert workers and engines and all(gone(process.pid, LATEST) for process in engines)
    assert all(gone(pid, LATEST) for pid in training)
    assert served.state(run) == "RUNNING"  # nobody is left who could say otherwise
    until("another attempt", lambda: served.call("GET", f"/flow_runs/{run}")["run_count"] == 2)
    print(
        f"taken over after {time.monotonic() - began:.0f} s; lost after {served.lost_after:.0f} s without a heartbeat"
    )
    assert trained(served, run, folder) == undisturbed
    assert before == {key: (folder / "run" / key).stat().st_mtime_ns for key in before}
    # Its last lines are sent after its last state.
    until("the run's log says how far it is", lambda: told(served, run, r"Train: \d+ of 12 steps"), LATEST)


def test_a_run_goes_on_while_its_server_is_restarted(
    served: Served, mix: Path, recipe: Path, tmp_path: Path, undisturbed: str
) -> None:
    folder = begun(mix, tmp_path)
    run = train(served, recipe, folder)
    training = in_step(served, folder, 1)
    (old,) = served.processes("flows.prefect_cli")
    os.kill(old.pid, signal.SIGKILL)
    until("another server", lambda: [p for p in served.processes("flows.prefect_cli") if p.pid != old.pid])
    assert training == children(served, folder) or not children(served, folder)
    assert trained(served, run, folder) == undisturbed


def test_nothing_large_crosses_prefect(served: Served, mix: Path, undisturbed: str) -> None:
    """Whatever the server was told of all runs before: parameters, states, artifacts, lines of logs."""
    largest = dict.fromkeys(("parameters", "state", "artifact", "line"), 0)
    runs = [
        *served.call("POST", "/flow_runs/filter", {"limit": 200}),
        *served.call("POST", "/task_runs/filter", {"limit": 200}),
    ]
    for run in runs:
        given = json.dumps(run.get("parameters") or run.get("task_inputs") or {})
        largest["parameters"] = max(largest["parameters"], len(given))
        largest["state"] = max(largest["state"], len(json.dumps(run["state"])))
    for artifact in served.call("POST", "/artifacts/filter", {"limit": 200}):
        largest["artifact"] = max(largest["artifact"], len(json.dumps(artifact["data"])))
    for line in served.call("POST", "/logs/filter", {"limit": 200}):
        largest["line"] = max(largest["line"], len(line["message"]))
    print(f"largest, in bytes: {largest}")
    assert len(runs) > 5
    assert largest["parameters"] < 4_000 and largest["state"] < 4_000
    assert largest["artifact"] < 250_000 and largest["line"] < 4_000


def test_ctrl_c_says_what_it_stops_and_leaves_no_process(
    served: Served, mix: Path, recipe: Path, tmp_path: Path
) -> None:
    folder = begun(mix, tmp_path)
    train(served, recipe, folder)
    in_step(served, folder, 1)
    below = served.processes("")
    seconds = served.stop()
    print(f"stopped after {seconds:.1f} s")
    assert all(gone(process.pid, 5) for process in below)
    said = served.said()
    for line in (f"cancelling train {tmp_path.name}", "stopping the worker", "stopping the server", "stopped"):
        assert line in said
    assert served.process.returncode == 0 and seconds < 2 * LATEST
