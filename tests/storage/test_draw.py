"""Draws: fair, bound to the statement and to its round's value, one for each date."""

import multiprocessing
from collections import Counter
from pathlib import Path

import pytest

from kernels import canonical
from storage.audit.beacon import Value, read_beacon
from storage.audit.certificate import Beacon
from storage.audit.draw import chosen, draw_key, load_draw, make_draw
from storage.audit.statement import announce, load_night, statement_key
from storage.errors import InputFault, MissingObject, Refused, UsageError
from tests.storage.drawn import BEACON, DATE, Book, Known, at

OTHER = Beacon(scheme="file", round=7, value="cd" * 32)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def test_recorded_once_for_a_date(book: Book) -> None:
    ledger, draw = book.ledger, book.draw(count=3)
    assert len(set(draw.steps)) == 3 and draw.steps == sorted(draw.steps) and set(draw.steps) <= set(range(12))
    assert (draw.run, draw.body.head, draw.body.step, draw.date) == (ledger.run_id, ledger.head, 12, DATE)
    assert book.draw(count=5) == draw == book.draw(count=3, beacon=OTHER)
    assert book.draw("2026-11-30", 3) != draw
    assert book.records.list("draws/") == [draw_key(ledger.run_id, day) for day in (DATE, "2026-11-30")]


def test_two_runs_share_a_folder_of_records(book: Book, tmp_path: Path) -> None:
    other = Book(tmp_path, 6, "another run")
    draws = [one.draw() for one in (book, other)]
    assert [draw.run for draw in draws] == [book.ledger.run_id, other.ledger.run_id]
    assert len(book.records.list("draws/")) == 2


def test_a_longer_run_still_knows_its_old_draws(tmp_path: Path) -> None:
    book = Book(tmp_path, 6)
    draw = book.draw()
    book.go_on(12)
    assert load_draw(book.records, book.ledger, DATE) == draw and draw.body.step == 6


def test_all_steps_where_more_are_asked_for(book: Book) -> None:
    assert book.draw(count=99).steps == list(range(12))


def test_how_many_steps_are_drawn_is_stated_before_the_value_is_known(book: Book) -> None:
    book.state(count=3)
    assert len(book.draw(count=1).steps) == 3


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
def test_edited_record(book: Book, edit: str) -> None:
    draw = book.draw(count=3)
    values = (Beacon(scheme="file", round=7, value=f"{number:064x}") for number in range(9))
    other = next(v for v in values if chosen(draw.run, book.ledger.head, DATE, v, 12, 3) != draw.steps)
    path = book.records.path(draw_key(book.ledger.run_id, DATE))
    document = canonical.loads(path.read_bytes())
    bodies = {"head": "0" * 64, "step": 11, "count": 2, "date": "2026-11-28", "run": "0" * 64, "round": 8}
    if edit in bodies:
        document["statement"]["body"][edit] = bodies[edit]
    else:
        document[edit] = {"steps": [11, 11, 11], "beacon": other.document(), "evidence": "00"}[edit]
    path.write_bytes(canonical.dumps(document))
    with pytest.raises(InputFault):
        load_draw(book.records, book.ledger, DATE)
    with pytest.raises(InputFault):
        book.draw(count=3)


def test_another_round_than_stated_cannot_draw(book: Book) -> None:
    statement = book.state()
    for number in (6, 8):
        other = Value(Beacon(scheme="file", round=number, value="ab" * 32), "")
        with pytest.raises(
            Refused, match=f"round {number} of file cannot draw for {DATE}: its statement names round 7"
        ):
            make_draw(book.records, book.ledger, statement, other, at(DATE))
    with pytest.raises(MissingObject):
        load_draw(book.records, book.ledger, DATE)


def _draw(book: Book, number: int, answers: "multiprocessing.Queue[str]") -> None:
    answers.put(book.draw(count=3, beacon=Beacon(scheme="file", round=7, value=f"{number:064x}")).digest())


def test_the_same_night_twice_at_once_is_one_draw(book: Book) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_draw, args=(book, number, answers)) for number in range(3)]
    for child in children:
        child.start()
    assert len({answers.get(timeout=30) for _ in children}) == 1
    for child in children:
        child.join()


def test_nothing_to_draw_from(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no steps"):
        Book(tmp_path, 0).state()


def test_only_the_trainer_states_a_night(book: Book) -> None:
    other = book.key("other")
    with pytest.raises(Refused, match=f"key {other.public} is not the run's trainer {book.trainer.public}"):
        announce(book.records, book.ledger, other, DATE, 1, Known(), at(DATE))
    assert not book.records.list()


@pytest.mark.parametrize(("date", "count"), [(DATE, 0), ("29.11.2026", 1), ("2026-13-01", 1), ("../x", 1)])
def test_wrong_usage(book: Book, date: str, count: int) -> None:
    with pytest.raises(UsageError):
        announce(book.records, book.ledger, book.trainer, date, count, Known(), at(DATE))


def test_a_statement_with_a_flipped_bit_is_refused(book: Book) -> None:
    book.state()
    path = book.records.path(statement_key(book.ledger.run_id, DATE))
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :])
        with pytest.raises(InputFault):
            load_night(book.records, book.ledger, DATE)


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
