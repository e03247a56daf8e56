"""A machine that is wrong, short of memory, or at odds with itself never makes a statement about a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model.spec import ModelSpec
from storage import engine
from storage.audit import confirm, replay
from storage.audit.certificate import verify
from storage.audit.keys import Key, load_or_create_key
from storage.audit.verdict import AuditProgress, Outcome, Verdict
from storage.ledger import Ledger
from storage.publish import publish
from storage.store import LocalStore
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.test_audit import republished

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("cpu", "generic:cpu")
WIDE = ModelSpec(vocab=300, d_model=768, layers=1, heads=12, kv_heads=2, head_dim=64, ffn=2048, seq_len=16, window=8)


def trained(folder: Path, until: int, **changes: Any) -> Small:
    made = Small(folder)
    small.begin(made.folder, made.store, made.mix, **changes)
    made.train(until)
    publish(made.store, made.mix, made.published, made.key)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Eight steps of a real model, with checkpoints 0, 5 and 8."""
    return trained(tmp_path_factory.mktemp("machine"), until=8)


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def wrong_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process computes step 6 wrongly, in the same way each time; another process does not."""
    original = engine.step

    def wrong(spec: Any, backend: Any, state: Any, windows: Any, **options: Any) -> Any:
        if state.step == 6:
            state.weights["head"][0, 0] += 1
        return original(spec, backend, state, windows, **options)

    monkeypatch.setattr(engine, "step", wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_that_is_wrong_as_long_as_it_lives(
    made: Small, auditor: Key, wrong_process: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Apple GPU's products came out wrong from one allocator state on, the same way until the process ended."""
    monkeypatch.setattr(engine, "self_test", lambda backend, report: None)  # slow, and all is well with it
    verdict = replay.audit_step(made.published, 7, backend, auditor)
    assert (verdict.outcome, verdict.exit_code, verdict.certificate) == (Outcome.MACHINE_FAULT, 12, None)
    assert "fresh process on this machine: match: entry 7 came out equal" in verdict.detail
    assert "at first: entry 6 differs: " in verdict.detail


@pytest.mark.slow
def test_initial_weights_that_are_wrong_in_the_used_process_only(
    made: Small, auditor: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fault where no step is replayed."""
    original = engine.initial_state

    def wrong(spec: Any, backend: Any) -> Any:
        state = original(spec, backend)
        state.weights["final_norm"][0] += 1
        return state

    monkeypatch.setattr(engine, "initial_state", wrong)
    verdict = replay.audit_initial(made.published, "cpu", auditor)
    assert (verdict.outcome, verdict.certificate) == (Outcome.MACHINE_FAULT, None)
    assert "fresh process on this machine: match: initial state root" in verdict.detail


def test_a_wrong_ledger_is_still_no_match(made: Small, auditor: Key, tmp_path: Path) -> None:
    """What a fresh process finds too is the run's fault, not the machine's; one can watch it being found again."""
    reports: list[AuditProgress] = []
    store = forged(made, tmp_path)
    verdict = replay.audit_step(store, 6, "cpu", auditor, report=reports.append)
    assert (verdict.exit_code, verdict.fields) == (10, ("loss",)), verdict.detail
    assert verdict.certificate and verify(verdict.certificate, Ledger(store), "step 6").body.verdict == "no-match"
    stages = ["self-test", "ledger", "checkpoint", "replay", "replay", "unit"]
    again = ["self-test", *(f"repetition: {stage}" for stage in stages)]
    told = ("vectors compared", "needs")  # a busy machine is told how far the self-test is; memory is said first
    assert [report.stage for report in reports if not any(word in report.stage for word in told)] == stages + again
    assert (reports[-1].step, reports[-1].done, reports[-1].of) == (6, 2, 2)


def forged(made: Small, folder: Path) -> LocalStore:
    """The release with another loss in entry 6, linked anew and signed by its trainer."""
    shutil.copytree(made.folder, folder / "copy")
    return republished(Small(folder / "copy"), {"loss": "3f800000"}, at=6)


def test_the_vectors_run_again_in_the_process_that_found_no_match(
    made: Small, auditor: Key, wrong_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results grew wrong with memory pressure, long after every check at the start had passed."""
    results = iter([[], ["norm 128.96.80 plain 1"]])
    monkeypatch.setattr(engine, "_self_test", lambda backend, report: next(results))
    monkeypatch.setattr(confirm, "repeat", None)  # not reached: one disagreement is enough
    verdict = replay.audit_step(made.published, 7, "cpu", auditor)
    assert (verdict.outcome, verdict.certificate) == (Outcome.MACHINE_FAULT, None)
    assert "norm 128.96.80 plain 1" in verdict.detail


FINDING = {
    **{"kind": "finding", "verdict": "no-match", "piece": "step 7", "detail": "x", "fault": ""},
    **{"compared": [], "differs_at": None, "fields": [], "tensors": []},
}
LINE = json.dumps(FINDING, sort_keys=True, separators=(",", ":"))


def repeated_by(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """What becomes of a no-match where a shell script stands in for the fresh process that repeats it."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(engine, "self_test", lambda backend, report: None)
    first = Verdict(Outcome.NO_MATCH, "step 7", "x", certificate=b"{}")
    return confirm.confirmed(LocalStore(folder), first, "cpu", lambda progress: None)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("kill -KILL $$", "was ended by signal 9: it said nothing"),
        ('printf \'{"kind":"fin\'; kill -KILL $$', "was ended by signal 9"),
        (f"echo '{LINE}'; echo MemoryError >&2; exit 1", "ended with exit code 1 and without a finding: MemoryError"),
        ("true", "ended with exit code 0 and without a finding"),
        ("echo no-match", "said what is no finding: b'no-match"),
        (f"echo '{LINE}'; echo '{LINE}'", "said what is no finding"),
        (f"echo ' {LINE}'", "said what is no finding"),
        (f"echo '{LINE.replace('step 7', 'step 7 ')}'", "came out differently"),
        (f"""echo '{LINE.replace('"detail":"x"', '"detail":""')}'""", "came out differently"),
        ("""echo '{"kind":"stage"}'""", "said what is no finding"),
        ("head -c 2000000 /dev/zero; sleep 100", "said what is no finding"),
    ],
)
def test_a_repetition_that_dies_or_talks_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    """A machine that cannot even repeat a step has no say in whether the run is right."""
    verdict = repeated_by(script, tmp_path, monkeypatch)
    assert (verdict.outcome, verdict.certificate) == (Outcome.MACHINE_FAULT, None)
    assert said in verdict.detail and "\n  next: " in verdict.detail


def test_a_repetition_that_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in above is believed where it says what was found before: the table tests what it should."""
    verdict = repeated_by(f"echo '{LINE}'", tmp_path, monkeypatch)
    assert (verdict.outcome, verdict.certificate) == (Outcome.NO_MATCH, b"{}")


CAPPED = """
import json, resource, sys
from pathlib import Path
from storage import engine
from storage.audit import replay
from storage.audit.keys import load_or_create_key
from storage.store import open_store
uri, backend, key, *rooms = sys.argv[1:]
# A first audit loads every kernel: LLVM ends the process where it finds no room for one's code.
replay.audit_step(open_store(uri), 0, backend, load_or_create_key(Path(key), "auditor"))
engine.self_test = lambda backend, report: None
for room in map(int, rooms):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), resource.RLIM_INFINITY))
    verdict = replay.audit_step(open_store(uri), 0, backend, load_or_create_key(Path(key), "auditor"))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps(verdict.document()))
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """One step of a model of 6.6 million parameters: 79 MB of state."""
    return trained(tmp_path_factory.mktemp("wide"), until=1, model=WIDE).published


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_audit_under_a_memory_cap(wide: LocalStore, tmp_path: Path, backend: str) -> None:
    """Under memory pressure results came out wrong: here an allocation that fails is an error, wherever it happens."""
    rooms = ("16", "96", "112", "128", "144", "512")  # MiB beyond what the process holds so far
    command = [sys.executable, "-c", CAPPED, wide.uri, backend, str(tmp_path), *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    verdicts = [document["verdict"] for document in documents]
    assert (verdicts[0], verdicts[-1], set(verdicts)) == ("machine-fault", "match", {"machine-fault", "match"}), done
    assert all(d["verdict"] == "match" or "the replay broke off here" in d["detail"] for d in documents)
