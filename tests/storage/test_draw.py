"""Draws: fair, bound to the statement and to its round's value, one for each date."""

import multiprocessing
from collections import Counter
from pathlib import Path

import pytest

from kernels import canonical
from storage.audit.beacon import Value, read_beacon
from storage.audit.certificate import Beacon
from storage.audit.draw import chosen, draw_key, load_draw, make_draw
from storage.audit.keys import load_or_create_key
from storage.audit.statement import announce, load_night, statement_key
from storage.errors import InputFault, MissingObject, Refused, UsageError
from storage.store import LocalStore, MemoryStore
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.drawn import BEACON, Known, at, drawn, stated

DATE = "2026-11-29"


def test_recorded_once_for_a_date(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, MemoryStore(str(tmp_path))
    draw = drawn(records, ledger, made.key, DATE, 3)
    assert len(set(draw.steps)) == 3 and draw.steps == sorted(draw.steps) and set(draw.steps) <= set(range(12))
    assert (draw.run, draw.body.head, draw.body.step, draw.date) == (ledger.run_id, ledger.head, 12, DATE)
    assert drawn(records, ledger, made.key, DATE, 5) == draw
    assert drawn(records, ledger, made.key, DATE, 3, Beacon(scheme="file", round=8, value="cd" * 32)) == draw
    assert drawn(records, ledger, made.key, "2026-11-30", 3) != draw
    assert records.list("draws/") == [draw_key(ledger.run_id, day) for day in (DATE, "2026-11-30")]


def test_two_runs_share_a_folder_of_records(made: Small, tmp_path: Path) -> None:
    other, records = Small(tmp_path / "other"), MemoryStore(str(tmp_path))
    run, key = small.begin(other.folder, other.store, other.mix, seed=8)
    other.train(until=6)
    draws = [
        drawn(records, made.run().ledger, made.key, DATE),
        drawn(records, other.run().ledger, key, DATE),
    ]
    assert [draw.run for draw in draws] == [made.run().ledger.run_id, run.ledger.run_id]


def test_a_longer_run_still_knows_its_old_draws(begun: Small, tmp_path: Path) -> None:
    begun.train(until=6)
    records = MemoryStore(str(tmp_path))
    draw = drawn(records, begun.run().ledger, begun.key, DATE)
    begun.train()
    assert load_draw(records, begun.run().ledger, DATE) == draw and draw.body.step == 6


def test_all_steps_where_more_are_asked_for(made: Small, tmp_path: Path) -> None:
    assert drawn(MemoryStore(str(tmp_path)), made.run().ledger, made.key, DATE, 99).steps == list(range(12))


def test_how_many_steps_are_drawn_is_stated_before_the_value_is_known(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, MemoryStore(str(tmp_path))
    stated(records, ledger, made.key, DATE, 3)
    assert len(drawn(records, ledger, made.key, DATE, 1).steps) == 3


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


@pytest.mark.parametrize("edit", ["steps", "beacon", "evidence", "head", "step", "count", "date", "run", "round"])
def test_edited_record(made: Small, tmp_path: Path, edit: str) -> None:
    ledger, records = made.run().ledger, LocalStore(tmp_path / "records")
    drawn(records, ledger, made.key, DATE, 3)
    path = records.path(draw_key(ledger.run_id, DATE))
    document = canonical.loads(path.read_bytes())
    values = {"head": "0" * 64, "step": 11, "count": 2, "date": "2026-11-28", "run": "0" * 64, "round": 8}
    if edit in values:
        document["statement"]["body"][edit] = values[edit]
    else:
        other = {"round": 7, "scheme": "file", "value": "cd" * 32}
        document[edit] = {"steps": [0, 1, 2], "beacon": other, "evidence": "00"}[edit]
    path.write_bytes(canonical.dumps(document))
    with pytest.raises(InputFault):
        load_draw(records, ledger, DATE)
    with pytest.raises(InputFault):
        drawn(records, ledger, made.key, DATE, 3)


def test_another_round_than_stated_cannot_draw(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, MemoryStore(str(tmp_path))
    statement = stated(records, ledger, made.key, DATE)
    for number in (6, 8):
        other = Value(Beacon(scheme="file", round=number, value="ab" * 32), "")
        with pytest.raises(
            Refused, match=f"round {number} of file cannot draw for {DATE}: its statement names round 7"
        ):
            make_draw(records, ledger, statement, other, at(DATE))
    with pytest.raises(MissingObject):
        load_draw(records, ledger, DATE)


def _draw(made: Small, records: Path, number: int, answers: "multiprocessing.Queue[str]") -> None:
    beacon = Beacon(scheme="file", round=7, value=f"{number:064x}")
    answers.put(drawn(LocalStore(records), made.run().ledger, made.key, DATE, 3, beacon).digest())


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
    with pytest.raises(Refused, match="no steps"):
        stated(MemoryStore(str(tmp_path)), begun.run().ledger, begun.key, DATE)


def test_only_the_trainer_states_a_night(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, MemoryStore(str(tmp_path))
    other = load_or_create_key(tmp_path / "other", "trainer")
    with pytest.raises(Refused, match=f"key {other.public} is not the run's trainer {made.key.public}"):
        stated(records, ledger, other, DATE)
    assert not records.list()


@pytest.mark.parametrize(("date", "count"), [(DATE, 0), ("29.11.2026", 1), ("2026-13-01", 1), ("../x", 1)])
def test_wrong_usage(made: Small, tmp_path: Path, date: str, count: int) -> None:
    with pytest.raises(UsageError):
        announce(MemoryStore(str(tmp_path)), made.run().ledger, made.key, date, count, Known(), at(DATE))


def test_a_statement_with_a_flipped_bit_is_refused(made: Small, tmp_path: Path) -> None:
    ledger, records = made.run().ledger, LocalStore(tmp_path / "records")
    stated(records, ledger, made.key, DATE)
    path = records.path(statement_key(ledger.run_id, DATE))
    data = path.read_bytes()
    for position in range(0, len(data), 5):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        with pytest.raises(InputFault):
            load_night(records, ledger, DATE)


def test_beacon_file(tmp_path: Path) -> None:
    path = tmp_path / "beacon.json"
    with pytest.raises(UsageError):
        read_beacon(path)
    path.write_bytes(BEACON.canonical() + b"\n")
    assert read_beacon(path) == BEACON
    for data in (b"{}", Beacon(scheme="quicknet", round=1000, value="ab" * 32).canonical()):
        path.write_bytes(data)
        with pytest.raises(InputFault):
            read_beacon(path)
