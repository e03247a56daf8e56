"""Nights: settled by whichever slot runs; stated, witnessed and drawn in this order, or missed; never two of these."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from storage.audit import drand
from storage.audit.beacon import Own, Quicknet, Value
from storage.audit.draw import load_draw, make_draw
from storage.audit.keys import Key
from storage.audit.settle import draw_once, settle
from storage.audit.statement import (
    Missed,
    Statement,
    admit_missed,
    announce,
    check_night,
    first,
    load_night,
    statement_key,
)
from storage.audit.witness import bear_witness, in_time, parse_witness, witness_key
from storage.errors import Equivocation, InputFault, MissingObject, Refused
from storage.ledger import Ledger
from storage.store import LocalStore, MemoryStore
from tests.file_server import serving
from tests.storage.drawn import DATE, Book, Known, at, hourly, resigned
from tests.storage.test_drand import PATH, ROUND, SIGNATURE, VALUE


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


@pytest.fixture
def ledger(book: Book) -> Ledger:
    return book.ledger


@pytest.fixture
def records(book: Book) -> LocalStore:
    return book.records


@pytest.fixture
def other(book: Book) -> Key:
    return book.key("witness")


def test_a_night_is_stated_and_then_drawn(
    book: Book, ledger: Ledger, records: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, before = hourly(monkeypatch), at(DATE, "02:50:00")
    first_call = settle(records, ledger, book.trainer, source, 2, before)
    assert first_call.due == at(DATE, "04:00:00") and not first_call.draws  # the next hour is too near for a witness
    assert settle(records, ledger, book.trainer, source, 5, before + timedelta(minutes=9)) == first_call
    assert not records.list("draws/")
    after = settle(records, ledger, book.trainer, source, 2, at(DATE, "04:00:00"))
    assert after.due is None and list(after.draws) == [DATE] and len(after.draws[DATE].steps) == 2
    assert settle(records, ledger, book.trainer, source, 9, at(DATE, "23:59:59")) == after


def test_drand_draws_from_a_statement_that_names_its_round(book: Book, ledger: Ledger, records: LocalStore) -> None:
    with serving() as server:
        server.files[PATH] = json.dumps({"round": ROUND, "randomness": VALUE, "signature": SIGNATURE}).encode()
        source, due = Quicknet(server.url), drand.time_of(ROUND)
        stated_first = settle(records, ledger, book.trainer, source, 3, due - timedelta(minutes=15))
        assert (stated_first.due, stated_first.statement.body.round) == (due, ROUND) and not server.asked
        draw = settle(records, ledger, book.trainer, source, 3, due).draws["2023-08-23"]
        assert (draw.beacon.value, draw.evidence, len(draw.steps)) == (VALUE, SIGNATURE, 3)
        assert load_draw(records, ledger, "2023-08-23") == draw
        assert settle(records, ledger, book.trainer, source, 3, due).draws["2023-08-23"] == draw
        assert len(server.asked) == 1


@pytest.mark.parametrize("late", ["06:00:00", "23:00:00"])
def test_whichever_late_slot_runs_settles_every_night(
    book: Book, ledger: Ledger, records: LocalStore, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    settle(records, ledger, book.trainer, source, 2, at("2026-11-25"))  # stated; the machine dies before its round
    done = settle(records, ledger, book.trainer, source, 2, at(DATE, late))
    assert list(done.draws) == ["2026-11-25"] and done.missed == ["2026-11-26", "2026-11-27", "2026-11-28"]
    assert (done.statement.body.date, done.undrawn, done.due is None) == (DATE, {}, False)
    again = settle(records, ledger, book.trainer, source, 2, at(DATE, late))
    assert (again.draws, again.missed) == (done.draws, done.missed)  # who was to audit them may have been stopped
    assert done.due and len(records.list("statements/")) == 2  # a missed night is admitted beside a draw
    after = settle(records, ledger, book.trainer, source, 2, done.due)
    assert DATE in after.draws and after.missed == done.missed
    if after.due:  # the round came out at midnight
        settle(records, ledger, book.trainer, source, 2, after.due)
    nights = [load_night(records, ledger, f"2026-11-{day}") for day in range(25, 30)]
    assert [isinstance(night, Missed) for night in nights] == [False, True, True, True, False]
    week_over = settle(records, ledger, book.trainer, source, 2, at("2026-12-03"))
    assert DATE in week_over.draws and "2026-11-25" not in week_over.draws


def test_a_late_draw_that_cannot_be_made_stays_open_and_holds_up_nothing(
    book: Book, ledger: Ledger, records: LocalStore
) -> None:
    book.state("2026-11-28")
    done = settle(records, ledger, book.trainer, Own(records), 2, at(DATE))
    assert list(done.draws) == [DATE]
    assert done.undrawn == {"2026-11-28": "round 7 is no date, so its value was not drawn on this machine"}
    assert settle(records, ledger, book.trainer, Known(), 2, at(DATE)).draws.keys() == {"2026-11-28", DATE}


def test_a_clock_that_is_ahead_draws_nothing_and_gives_no_night_away(
    book: Book, ledger: Ledger, records: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds have times: the server has no value yet, whatever the trainer's clock says."""
    source = hourly(monkeypatch)
    settle(records, ledger, book.trainer, source, 2, at(DATE))
    settle(records, ledger, book.trainer, source, 2, at(DATE, "04:00:00"))

    def not_yet(number: int) -> Value:
        raise Refused(f"round {number} is not out")

    monkeypatch.setattr(source, "fetch", not_yet)
    ahead = settle(records, ledger, book.trainer, source, 2, at("2026-12-10"))
    assert ahead.due and not ahead.draws.keys() - {DATE}
    with pytest.raises(Refused, match="is not out"):
        settle(records, ledger, book.trainer, source, 2, ahead.due)
    assert [key[-15:-5] for key in records.list("draws/")] == [DATE]
    assert [key[-15:-5] for key in records.list("statements/")] == [DATE, "2026-12-10"]  # none between is called missed


def test_values_of_this_machine_are_drawn_once(book: Book, ledger: Ledger, records: LocalStore) -> None:
    drawings = [settle(records, ledger, book.trainer, Own(records), 2, at(DATE)).draws[DATE] for _ in range(2)]
    assert drawings[0] == drawings[1] and drawings[0].beacon.round == 20261129
    assert records.list("beacons/") == [f"beacons/{DATE}.json"]


def test_a_missed_night_cannot_be_stated_afterwards(
    book: Book, ledger: Ledger, records: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    admitted = admit_missed(records, ledger, book.trainer, "2026-11-28", at(DATE))
    assert announce(records, ledger, book.trainer, "2026-11-28", 2, source, at(DATE)) == admitted
    elsewhere = MemoryStore("elsewhere")
    with pytest.raises(InputFault, match="which comes out at 2026-11-29"):
        announce(elsewhere, ledger, book.trainer, "2026-11-28", 2, source, at(DATE))
    assert not elsewhere.list()


def test_a_night_that_is_stated_in_its_last_second(book: Book, ledger: Ledger, records: LocalStore) -> None:
    source, now = Quicknet("http://unused"), at(DATE, "23:59:59") + timedelta(microseconds=999_999)
    settled = settle(records, ledger, book.trainer, source, 2, now)
    assert settled.statement.body.date == DATE and settled.due and settled.due == at("2026-11-30", "00:15:00")


def test_a_round_that_is_not_out_cannot_draw(
    book: Book, ledger: Ledger, records: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    statement = announce(records, ledger, book.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    value = source.fetch(statement.body.round)
    with pytest.raises(Refused, match="comes out at"):
        make_draw(records, ledger, statement, value, at(DATE))
    forged = Value(value.beacon.model_copy(update={"value": "0" * 64}), "")
    with pytest.raises(InputFault, match="not the value of this hour"):
        make_draw(records, ledger, statement, forged, at(DATE, "09:00:00"))
    with pytest.raises(MissingObject):
        load_draw(records, ledger, DATE)


def test_another_scheme_than_stated_cannot_draw(book: Book, ledger: Ledger, records: LocalStore) -> None:
    statement = book.state()
    with pytest.raises(Refused, match="names a round of file, this is a source of quicknet"):
        draw_once(records, ledger, statement, Quicknet("http://unused"), at(DATE))


def test_a_witness_signs_before_the_round_and_keeps_what_it_saw(
    book: Book, ledger: Ledger, records: LocalStore, other: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, own = hourly(monkeypatch), LocalStore(tmp_path / "own")
    statement = announce(records, ledger, book.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    witness = bear_witness(own, ledger, other, statement, at(DATE, "03:05:00"))
    assert in_time(witness, statement) and witness.body.seen == f"{DATE}T03:05:00Z"
    assert load_night(own, ledger, DATE) == statement
    assert bear_witness(own, ledger, other, statement, at(DATE, "03:10:00")) == witness
    with pytest.raises(Refused, match="may have been made after it"):
        bear_witness(own, ledger, other, statement, at(DATE, "05:00:00"))
    with pytest.raises(Refused, match="its own witness"):
        bear_witness(own, ledger, book.trainer, statement, at(DATE))


def test_a_file_s_round_has_no_time_so_no_witness_is_in_time(
    book: Book, ledger: Ledger, records: LocalStore, other: Key
) -> None:
    statement = book.state()
    assert not in_time(bear_witness(records, ledger, other, statement, at(DATE)), statement)


def test_a_witness_is_bound_to_statement_time_and_key(
    book: Book, ledger: Ledger, records: LocalStore, other: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    statement = announce(records, ledger, book.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    witness = bear_witness(records, ledger, other, statement, at(DATE))
    assert not in_time(witness, resigned(statement, book.trainer, count=1))
    path = records.path(witness_key(ledger.run_id, DATE, other.public))
    data = path.read_bytes()
    for position in range(0, len(data), 5):
        changed = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        with pytest.raises(InputFault):
            parse_witness(changed, "witness", ledger.run_id)


def test_heads_ground_after_the_beacon_find_no_witness(
    book: Book, ledger: Ledger, records: LocalStore, other: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    ground = announce(records, ledger, book.trainer, DATE, 1, source, at(DATE))  # the clock was turned back
    assert isinstance(ground, Statement)
    with pytest.raises(Refused, match=f"round {ground.body.round} of hourly came out"):
        bear_witness(records, ledger, other, ground, at(DATE, "04:00:01"))


def test_two_statements_of_a_night_are_found_by_the_witness(
    book: Book, ledger: Ledger, records: LocalStore, other: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hourly(monkeypatch)
    statement = announce(records, ledger, book.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    bear_witness(records, ledger, other, statement, at(DATE))
    for changes in ({"round": statement.body.round + 1}, {"count": 1}):
        with pytest.raises(Equivocation, match=f"two statements of {DATE}"):
            bear_witness(records, ledger, other, resigned(statement, book.trainer, **changes), at(DATE))


def test_a_night_called_missed_after_its_statement_is_found_by_the_witness(
    book: Book, ledger: Ledger, records: LocalStore, other: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = announce(MemoryStore("lost"), ledger, book.trainer, DATE, 2, hourly(monkeypatch), at(DATE))
    assert isinstance(statement, Statement)
    admit_missed(records, ledger, book.trainer, DATE, at(DATE))
    with pytest.raises(Equivocation, match=f"called the night of {DATE} missed"):
        bear_witness(records, ledger, other, statement, at(DATE))


def test_another_history_than_the_ledger_s_is_equivocation(book: Book, ledger: Ledger, records: LocalStore) -> None:
    statement = book.state()
    check_night(statement, ledger)
    for changes in ({"head": "0" * 64}, {"step": 11}):
        with pytest.raises(Equivocation, match="the run's trainer signed both") as caught:
            check_night(resigned(statement, book.trainer, **changes), ledger)
        assert caught.value.exit_code == 11


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": "0" * 64}, "is of run 000"),
        ({"step": 13}, "is of 13 steps, the ledger holds 12"),
        ({"count": 13}, "draws 13 of 12 steps"),
        ({"scheme": "dice"}, "no beacon scheme"),
        ({"date": "../../x"}, "which is no date of a night"),
        ({"scheme": "quicknet", "round": 1000}, "which comes out at 2023-08-23"),
    ],
)
def test_a_statement_that_cannot_be(
    book: Book, ledger: Ledger, records: LocalStore, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(InputFault, match=said):
        check_night(resigned(book.state(), book.trainer, **changes), ledger)


def test_a_renamed_record_is_no_other_night_s(book: Book, ledger: Ledger, records: LocalStore) -> None:
    book.draw()
    for folder in ("statements", "draws"):
        path = records.path(f"{folder}/{ledger.run_id[:16]}/{DATE}.json")
        path.rename(path.with_name("2026-11-28.json"))
    for load in (load_night, load_draw):
        with pytest.raises(InputFault, match=f"is (a draw )?of {DATE}"):
            load(records, ledger, "2026-11-28")


def test_the_first_of_two_that_state_a_night_stands(book: Book, ledger: Ledger, records: LocalStore) -> None:
    statement = book.state()
    other = resigned(statement, book.trainer, round=8)
    assert first(records, ledger, other) == statement
    assert records.list("statements/") == [statement_key(ledger.run_id, DATE)]
