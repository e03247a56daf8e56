"""Segments: a run that was stopped anywhere ends like one that never was; what differs is reported, never skipped."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kernels import canonical
from model.step import StepRecord
from storage import checkpoint, engine
from storage.account import account
from storage.audit.check import check_entries
from storage.audit.keys import load_or_create_key
from storage.beside import digests_key, load_digests
from storage.errors import Divergence, Halted, InputFault, LedgerFault, Refused, StorageError, UsageError, VerbatimError
from storage.figures import ZeroWatch, load_probe, probe_key
from storage.ledger import Entry, part_key
from storage.run import RECIPE_KEY, create_run
from storage.segment import SegmentEnd, SegmentStart
from storage.store import MemoryStore
from storage.training import StepProgress, stop_on_signal, train_segment
from tests.storage import small
from tests.storage.conftest import Small, flip


def ends(made: Small) -> list[SegmentEnd]:
    keys = [key for key in made.store.list("segments/") if key.endswith(".end.json")]
    return sorted((SegmentEnd.parse(made.store.read(key), key) for key in keys), key=lambda end: end.last_step)


def test_whole_run(begun: Small, made: Small) -> None:
    reports: list[StepProgress] = []
    result = train_segment(begun.run(), "cpu", checkpoint_every=5, diagnostics_every=4, report=reports.append)
    assert (result.first_step, result.last_step, result.validated, result.outcome) == (0, 12, (), "finished")
    assert result.head == made.run().ledger.head
    assert [report.step for report in reports] == list(range(12)) and reports[-1].seconds_left == 0
    assert checkpoint.steps(begun.store) == [0, 5, 10, 12]
    probes = [load_probe(begun.store, begun.run().ledger, k) for k in (0, 5, 10, 12)]
    assert all(probe.sources.keys() == {"verbs", "nouns"} and probe.mean() is not None for probe in probes)
    assert [key[12:20] for key in begun.store.list("diagnostics/")] == ["00000000", "00000004", "00000008"]
    again = create_run(begun.store, begun.run().stream, begun.run().spec, begun.key.public, engine, b"another plan\n")
    assert again.ledger.head == result.head and begun.store.read(RECIPE_KEY) == b"name: small\n"


def test_held_out_losses_of_another_state_are_found(made: Small) -> None:
    assert list(account(made.store).held_out) == [0, 5, 10, 12]
    made.store.path(probe_key(5)).write_bytes(made.store.read(probe_key(10)))
    with pytest.raises(InputFault, match=r"probe/00000005.json: its step is 10, expected 5"):
        account(made.store)


@pytest.mark.parametrize("lie", [{"last_step": 2**52, "validated_steps": 2**52}, {"run": "0" * 64}, {"first_step": 12}])
def test_a_segment_that_says_what_the_ledger_does_not_is_no_account(made: Small, lie: dict[str, Any]) -> None:
    record = ends(made)[-1]
    told = record.model_copy(update={"validated_steps": 1} | lie).canonical()
    made.store.path(f"segments/{record.segment}.end.json").write_bytes(told)
    with pytest.raises(InputFault, match=r"says that steps .* has 12 steps") as caught:
        account(made.store)
    assert "move it out of the run's folder" in caught.value.next_step


def test_digests_beside_every_entry_prove_themselves(made: Small) -> None:
    for entry in made.run().ledger:
        digests = load_digests(made.store, entry)
        assert len(digests.tensors) == 3 * len(digests.gradient)
    flip(made.store.path(digests_key(3)), 700)
    with pytest.raises(InputFault):
        load_digests(made.store, made.run().ledger[3])


def test_segments_end_where_asked(begun: Small, made: Small) -> None:
    outcomes = [begun.train(until).outcome for until in (3, 9, None)]
    assert outcomes == ["paused", "paused", "finished"]
    assert begun.run().ledger.head == made.run().ledger.head
    assert checkpoint.steps(begun.store) == [0, 3, 5, 9, 10, 12]
    assert [(end.first_step, end.last_step, end.outcome) for end in ends(begun)] == [
        (0, 3, "paused"), (3, 9, "paused"), (9, 12, "finished"),
    ]  # fmt: skip


def test_killed_between_checkpoints(begun: Small, made: Small) -> None:
    child = os.fork()
    if child == 0:
        train_segment(begun.run(), "cpu", checkpoint_every=5, diagnostics_every=4, report=_die_at_eight)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(begun.run().ledger) == 9 and not ends(begun)
    result = begun.train()
    assert result.validated == (5, 6, 7, 8) and result.head == made.run().ledger.head
    assert [end.validated_steps for end in ends(begun)] == [4]


def _die_at_eight(progress: StepProgress) -> None:
    if progress.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", range(0, 45, 5))
def test_killed_at_any_object(begun: Small, made: Small, count: int) -> None:
    """Kill before the count-th object of the run is linked to its name, wherever that falls."""
    child = os.fork()
    if child == 0:
        small.die_at_link(count, begun.train)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    result = begun.train()
    assert result.head == made.run().ledger.head and result.outcome == "finished"
    assert _lasting(begun) == _lasting(made)


def _lasting(made: Small) -> dict[str, bytes]:
    """Every object but the segment records."""
    return {key: made.store.read(key) for key in made.store.list() if not key.startswith("segments/")}


def test_sigterm_leaves_a_whole_checkpoint_at_the_step_boundary(begun: Small, made: Small) -> None:
    def interrupt(progress: StepProgress) -> None:
        if progress.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with stop_on_signal() as should_stop:
        result = train_segment(
            begun.run(), "cpu", checkpoint_every=5, diagnostics_every=4, report=interrupt, should_stop=should_stop
        )
    assert (result.last_step, result.outcome) == (7, "stopped") and checkpoint.steps(begun.store) == [0, 5, 7]
    assert begun.train().validated == () and begun.run().ledger.head == made.run().ledger.head


def test_other_cadence_and_segments_give_the_same_ledger(begun: Small, made: Small) -> None:
    for until in (1, 2, 11, 12):
        begun.train(until, every=3)
    assert begun.run().ledger.trajectory_root() == made.run().ledger.trajectory_root()
    assert begun.run().ledger.head == made.run().ledger.head


def test_a_finished_run_has_nothing_left_to_do(made: Small) -> None:
    result = made.train()
    assert (result.first_step, result.last_step, result.validated, result.outcome) == (12, 12, (), "finished")


def test_repeated_step_that_differs_stops_with_a_report(begun: Small) -> None:
    begun.train(until=5)
    begun.train(until=8, every=100)
    begun.store.path("checkpoints/00000008.json").unlink()
    head = begun.run().ledger.head
    with small.stand_in(flaw=6), pytest.raises(Divergence) as caught:
        begun.train()
    error = caught.value
    assert error.exit_code == 10 and error.step == 6
    assert error.fields == ("state",) and error.tensors == ("weights/head",)
    assert "differing tensors: weights/head" in error.message
    assert begun.run().ledger.head == head and checkpoint.steps(begun.store) == [0, 5]
    assert [end.validated_steps for end in ends(begun) if end.outcome == "diverged"] == [1]
    assert begun.train().validated == (5, 6, 7)


def test_two_trainers_at_once_write_one_ledger(begun: Small, made: Small) -> None:
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            begun.train()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert _lasting(begun) == _lasting(made)
    assert sum(end.validated_steps for end in ends(begun)) == 12


def test_a_twin_that_trained_since_the_run_was_opened_is_caught_up_with(begun: Small, made: Small) -> None:
    """Its checkpoint lies beyond the entries that were read at opening; nothing is cut off."""
    opened = begun.run()
    begun.train(until=6)
    result = train_segment(opened, "cpu", checkpoint_every=5, diagnostics_every=4)
    assert (result.first_step, result.outcome, result.head) == (6, "finished", made.run().ledger.head)
    assert opened.ledger.parts == begun.run().ledger.parts


def test_edited_ledger_is_found_at_restart(made: Small) -> None:
    flip(made.store.path(part_key(4)), 200)
    with pytest.raises(LedgerFault):
        made.train()


def test_spike_is_recorded_skipped_and_replayed(begun: Small) -> None:
    with small.stand_in(norms={4: "7"}):
        begun.train(until=7, every=3)
        begun.store.path("checkpoints/00000007.json").unlink()
        begun.store.path("checkpoints/00000006.json").unlink()
        assert begun.train(every=3).validated == (3, 4, 5, 6)
    events = [entry.event for entry in begun.run().ledger]
    assert events[3:7] == ["", "spike", "cooldown", ""]
    states = [load_digests(begun.store, entry) for entry in begun.run().ledger]
    assert states[3].tensors == states[4].tensors == states[5].tensors != states[6].tensors
    assert len({entry.state for entry in begun.run().ledger}) == 12  # scalars go on where weights do not


def test_halt_stops_and_stays_stopped(begun: Small) -> None:
    with small.stand_in(norms={2: "7", 4: "7", 6: "7"}):
        for attempt in range(2):
            with pytest.raises(Halted, match="halts the run at step 6: 3 spikes within 12 steps") as caught:
                begun.train()
            assert caught.value.exit_code == 1 and ends(begun)[attempt].outcome == "halted"
    assert len(begun.run().ledger) == 7


def test_a_ledger_that_goes_on_after_a_halt_is_found(begun: Small) -> None:
    def heedless(*arguments: Any, **options: Any) -> StepRecord:
        return replace(step(*arguments, **options), halt=False)

    with small.stand_in(norms={2: "7", 4: "7", 6: "7"}):
        step = engine.step
        with mock.patch.object(engine, "step", heedless):
            begun.train()
    with pytest.raises(Divergence, match="halts the run at step 6, but the ledger goes on"):
        check_entries(begun.run())


def test_segment_record_says_what_ran(made: Small) -> None:
    (key,) = (key for key in made.store.list("segments/") if key.endswith(".start.json"))
    start = SegmentStart.parse(made.store.read(key), key)
    assert (start.run, start.first_step, start.until) == (made.run().ledger.run_id, 0, 12)
    assert start.provenance.backend == "cpu" and start.provenance.versions["numpy"] != "absent"
    assert start.provenance.conformance == made.run().spec.vectors


def test_other_windows_are_refused(made: Small, tmp_path: Path) -> None:
    stream = small.mix(tmp_path / "other", MemoryStore(str(tmp_path)), seed=4)
    with pytest.raises(Refused, match="mix root"):
        create_run(made.store, stream, small.spec(), made.key.public, engine.load_backend("cpu"))


def test_another_run_in_the_folder_is_refused(made: Small, tmp_path: Path) -> None:
    before, stream = made.store.list(), made.run().stream
    again = create_run(made.store, stream, small.spec(), made.key.public, engine.load_backend("cpu"))
    assert again.ledger.run_id == made.run().ledger.run_id
    other = load_or_create_key(tmp_path / "keys", "other")
    with pytest.raises(Refused, match=r"spec\.seed, trainer"):
        create_run(made.store, stream, small.spec(seed=8), other.public, engine.load_backend("cpu"))
    assert made.store.list() == before


def test_windows_of_another_length_are_a_usage_error(made: Small, tmp_path: Path) -> None:
    longer = small.spec(model=small.spec().model.model_copy(update={"seq_len": 32}))
    with pytest.raises(UsageError, match="windows hold 17 tokens"):
        create_run(MemoryStore(str(tmp_path)), made.run().stream, longer, "0" * 64, engine.load_backend("cpu"))


def test_damaged_window_stops_training(begun: Small) -> None:
    for path in (begun.mix.root / "windows").rglob("train/*.arrow"):
        flip(path, path.stat().st_size // 2)
    with pytest.raises(InputFault, match="window") as caught:
        begun.train()
    assert caught.value.exit_code == 11


def test_dead_tensor_is_an_error_across_restarts(made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.figures.ZERO_LIMIT", 3)
    digests = load_digests(made.store, made.run().ledger[5]).gradient

    class Record:
        step, gradient, gradients, zero_gradients = 8, "0" * 64, digests, ("head",)

    for step in (6, 7):
        path = made.store.path(digests_key(step))
        document = canonical.loads(path.read_bytes())
        document["gradient"]["head"] = digests["head"]
        path.write_bytes(canonical.dumps(document))
    with pytest.raises(VerbatimError, match="gradient of head was exactly zero in 4 steps running, to step 8"):
        ZeroWatch(made.run()).see(Record())  # type: ignore[arg-type]


def test_wrong_usage(begun: Small) -> None:
    for options in ({"checkpoint_every": 0, "diagnostics_every": 1}, {"checkpoint_every": 1, "diagnostics_every": 0}):
        with pytest.raises(UsageError):
            train_segment(begun.run(), "cpu", **options)
    with pytest.raises(UsageError):
        train_segment(begun.run(), "cpu", -1, checkpoint_every=1, diagnostics_every=1)
    assert not begun.store.list("segments/")


def test_entry_holds_every_figure_of_the_step(made: Small) -> None:
    entry = made.run().ledger[9]
    assert entry == Entry.parse(entry.canonical(), "entry")
    assert (entry.step, entry.windows, entry.first_window, entry.tokens) == (9, 3, 19, 22 * small.SEQ_LEN)


def test_disk_that_fills_up_and_gets_room_again(begun: Small, made: Small) -> None:
    folder = begun.folder / "run"
    kept = {key: begun.store.read(key) for key in begun.store.list()}
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no permission to mount a small tmpfs; tests of the store take the same path by a file-size limit")
    try:
        for key, data in kept.items():
            begun.store.create(key, data)
        with pytest.raises(StorageError, match="No space left on device; nothing half-written is left") as caught:
            begun.train()
        assert caught.value.exit_code == 1 and "free some space" in str(caught.value)
        assert not list(folder.rglob(".tmp-*"))
        subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
        begun.train()
        assert _lasting(begun) == _lasting(made)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
