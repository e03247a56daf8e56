"""Draws: fair, bound to head and beacon, one for each date."""

import multiprocessing
from collections import Counter
from pathlib import Path

import pytest

from kernels import canonical
from storage.audit.certificate import Beacon
from storage.audit.draw import chosen, draw_key, load_draw, make_draw, read_beacon
from storage.errors import InputFault, Refused, UsageError
from storage.store import LocalStore, MemoryStore
from tests.storage import small
from tests.storage.conftest import Small

BEACON = Beacon(scheme="file", round=7, value="ab" * 32)


def test_recorded_once_for_a_date(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, MemoryStore(str(tmp_path))
    draw = make_draw(records, ledger, "2026-11-29", BEACON, 3)
    assert len(set(draw.steps)) == 3 and draw.steps == sorted(draw.steps) and set(draw.steps) <= set(range(12))
    assert (draw.run, draw.head, draw.basis) == (ledger.run_id, ledger.head, "trainer's word")
    assert make_draw(records, ledger, "2026-11-29", BEACON, 5) == draw
    other = Beacon(scheme="file", round=8, value="cd" * 32)
    assert make_draw(records, ledger, "2026-11-29", other, 3) == draw
    assert make_draw(records, ledger, "2026-11-30", BEACON, 3) != draw
    assert records.list() == [draw_key(ledger.run_id, day) for day in ("2026-11-29", "2026-11-30")]


def test_two_runs_share_a_folder_of_records(made: Small, tmp_path: Path) -> None:
    other, records = Small(tmp_path / "other"), MemoryStore(str(tmp_path))
    run, _ = small.begin(other.folder, other.store, other.mix, seed=8)
    other.train(until=6)
    draws = [make_draw(records, ledger, "2026-11-29", BEACON, 2) for ledger in (made.run().ledger, other.run().ledger)]
    assert [draw.run for draw in draws] == [made.run().ledger.run_id, run.ledger.run_id]


def test_a_longer_run_still_knows_its_old_draws(begun: Small, tmp_path: Path) -> None:
    begun.train(until=6)
    records = MemoryStore(str(tmp_path))
    draw = make_draw(records, begun.run().ledger, "2026-11-29", BEACON, 2)
    begun.train()
    assert load_draw(records, begun.run().ledger, "2026-11-29") == draw and draw.among == 6


def test_all_steps_where_more_are_asked_for(made: Small, tmp_path: Path) -> None:
    assert make_draw(MemoryStore(str(tmp_path)), made.run().ledger, "2026-11-29", BEACON, 99).steps == list(range(12))


def test_every_step_is_equally_likely() -> None:
    counts: Counter[int] = Counter()
    for number in range(2000):
        counts.update(chosen("0" * 64, f"{number:064x}", "2026-11-29", BEACON, 10, 3))
    assert sorted(counts) == list(range(10)) and all(520 < count < 680 for count in counts.values())


def test_words_beyond_the_last_whole_multiple_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["ffffffffffffffff", "fffffffffffffffe", "0000000000000005"])
    monkeypatch.setattr("storage.audit.draw.digest", lambda data, purpose: next(words) + "0" * 48)
    assert chosen("0" * 64, "1" * 64, "2026-11-29", BEACON, 7, 1) == [5]  # 2⁶⁴ = 2 mod 7


def test_steps_depend_on_everything() -> None:
    def steps(
        run: str = "0" * 64, head: str = "1" * 64, date: str = "2026-11-29", beacon: Beacon = BEACON
    ) -> tuple[int, ...]:
        return tuple(chosen(run, head, date, beacon, 10**6, 5))

    other = Beacon(scheme="file", round=8, value=BEACON.value)
    assert len({steps(), steps(run="2" * 64), steps(head="2" * 64), steps(date="2026-11-30"), steps(beacon=other)}) == 5


@pytest.mark.parametrize("edit", ["steps", "head", "among", "count", "date", "run", "beacon"])
def test_edited_record(made: Small, tmp_path: Path, edit: str) -> None:
    ledger, records = made.run().ledger, LocalStore(tmp_path / "records")
    make_draw(records, ledger, "2026-11-29", BEACON, 3)
    path = records.path(draw_key(ledger.run_id, "2026-11-29"))
    document = canonical.loads(path.read_bytes())
    values = {"steps": [0, 1, 2], "head": "0" * 64, "among": 11, "count": 2, "date": "2026-11-28", "run": "0" * 64}
    document[edit] = values.get(edit) or {"round": 7, "scheme": "file", "value": "cd" * 32}
    path.write_bytes(canonical.dumps(document))
    with pytest.raises(InputFault):
        load_draw(records, ledger, "2026-11-29")
    with pytest.raises(InputFault):
        make_draw(records, ledger, "2026-11-29", BEACON, 3)


def _draw(made: Small, records: Path, number: int, answers: "multiprocessing.Queue[str]") -> None:
    beacon = Beacon(scheme="file", round=number, value="ab" * 32)
    answers.put(make_draw(LocalStore(records), made.run().ledger, "2026-11-29", beacon, 3).digest())


def test_the_same_night_twice_at_once_is_one_draw(made: Small, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_draw, args=(made, tmp_path / "r", number, answers)) for number in range(3)]
    for child in children:
        child.start()
    assert len({answers.get(timeout=30) for _ in children}) == 1
    for child in children:
        child.join()


def test_nothing_to_draw_from(begun: Small, tmp_path: Path) -> None:
    with pytest.raises(Refused):
        make_draw(MemoryStore(str(tmp_path)), begun.run().ledger, "2026-11-29", BEACON, 1)


@pytest.mark.parametrize(("date", "count"), [("2026-11-29", 0), ("29.11.2026", 1), ("2026-13-01", 1), ("../x", 1)])
def test_wrong_usage(made: Small, tmp_path: Path, date: str, count: int) -> None:
    with pytest.raises(UsageError):
        make_draw(MemoryStore(str(tmp_path)), made.run().ledger, date, BEACON, count)


def test_beacon_file(tmp_path: Path) -> None:
    path = tmp_path / "beacon.json"
    with pytest.raises(UsageError):
        read_beacon(path)
    path.write_bytes(BEACON.canonical() + b"\n")
    assert read_beacon(path) == BEACON
    path.write_bytes(b"{}")
    with pytest.raises(InputFault):
        read_beacon(path)
