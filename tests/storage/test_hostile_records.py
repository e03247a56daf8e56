"""Hostile and damaged records, wrong clocks, servers that lie: one clear error or a told record, never a standstill."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import coverage, sampling
from kernels import canonical
from storage.audit import drand
from storage.audit.beacon import Own, Quicknet
from storage.audit.certificate import Certificate, verify
from storage.audit.collect import collect
from storage.audit.draw import MAX_DRAW, Draw, chosen, draw_key, parse_draw
from storage.audit.keys import load_or_create_key
from storage.audit.named import load_named
from storage.audit.settle import settle
from storage.audit.statement import (
    MAX_COUNT,
    PURPOSE,
    Statement,
    StatementBody,
    check_night,
    load_night,
    parse_night,
    statement_key,
)
from storage.audit.witness import bear_witness, witness_key
from storage.corpus import download
from storage.corpus.remote import Answer
from storage.errors import CertificateFault, InputFault, MissingObject, Refused, StorageError, UsageError, VerbatimError
from storage.objects import MAX_KEY
from storage.store import LocalStore
from tests.file_server import serving
from tests.storage.drawn import BEACON, DATE, Book, Known, at, hourly
from tests.storage.test_drand import PATH, ROUND, SIGNATURE


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


def signed(book: Book, **changes: object) -> Statement:
    """A statement that the run's trainer signed, whatever it says."""
    fields: dict[str, object] = {
        "run": book.ledger.run_id,
        "date": DATE,
        "step": len(book.ledger),
        "head": book.ledger.head,
        "count": 2,
        "scheme": "file",
        "round": 7,
    }
    body = StatementBody.model_validate(fields | changes)
    return Statement(body=body, signature=book.trainer.sign(body.canonical(), PURPOSE))


def put(book: Book, key: str, data: bytes) -> None:
    path = book.records.path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


BEYOND_TIME = [
    {"scheme": "quicknet", "round": 2**53 - 1},
    {"scheme": "quicknet", "round": 10**11, "date": "9999-12-31"},
    {"date": "9999-12-31"},
    {"date": "0001-01-01"},
    {"date": "1970-01-01"},
    {"date": "20261129"},
    {"scheme": "x" * 4096},
]


@pytest.mark.parametrize("changes", BEYOND_TIME)
def test_a_trainer_s_dates_and_rounds_beyond_the_calendar_are_told(book: Book, changes: dict[str, object]) -> None:
    statement = signed(book, **changes)
    with pytest.raises(InputFault) as caught:
        check_night(statement, book.ledger)
    assert len(caught.value.message) < 300
    place = f"statements/{book.ledger.run_id[:16]}/{DATE}.json"
    put(book, place, statement.canonical())
    draw = Draw(statement=statement, beacon=BEACON, evidence="", steps=[1, 2])
    put(book, draw_key(book.ledger.run_id, DATE), draw.canonical())
    found = collect([book.records], book.ledger)
    assert len(found.faulty) == 2 and not found.statements and not found.draws
    done = sampling.witness(str(book.published.root), str(book.records.root), str(book.folder / "w"), book.folder)
    assert {row["exit_code"] for row in done} <= {11} and not LocalStore(book.folder / "w").list()


def test_no_draw_is_larger_than_its_reader_allows(book: Book) -> None:
    largest = Draw(statement=signed(book), beacon=BEACON, evidence="", steps=[99_999_999] * MAX_COUNT)
    assert len(largest.canonical()) < MAX_DRAW
    with pytest.raises(UsageError, match=f"between 1 and {MAX_COUNT}"):
        book.state(count=MAX_COUNT + 1)
    assert not book.records.list()


def test_every_step_of_a_long_run_is_chosen_in_seconds() -> None:
    assert chosen("0" * 64, "1" * 64, DATE, BEACON, 20_000, 20_000) == list(range(20_000))


@pytest.mark.parametrize("name", ["abc", "0000", "2026-1-1", "20261120", "2026-W48-7", "sub/2026-11-20", "2023-01-01"])
def test_a_stray_file_among_statements_is_no_night(book: Book, name: str) -> None:
    put(book, f"statements/{book.ledger.run_id[:16]}/{name}.json", b"{}")
    done = settle(book.records, book.ledger, book.trainer, Known(), 2, at(DATE))
    assert list(done.draws) == [DATE] and (done.missed, done.undrawn) == ([], {})


def test_a_damaged_night_does_not_hold_up_the_next_ones(book: Book) -> None:
    for day in ("2026-11-26", "2026-11-27"):
        book.draw(day)
    damaged = book.records.path(statement_key(book.ledger.run_id, "2026-11-27"))
    damaged.write_bytes(damaged.read_bytes().replace(b'"count":2', b'"count":3'))
    done = settle(book.records, book.ledger, book.trainer, Known(), 2, at(DATE))
    assert list(done.draws) == ["2026-11-26", DATE] and done.missed == ["2026-11-28"]
    assert list(done.undrawn) == ["2026-11-27"] and "not signed by the run's trainer" in done.undrawn["2026-11-27"]
    assert load_night(book.records, book.ledger, "2026-11-28").body.kind == "missed"


def test_a_clock_that_is_ahead_gives_no_night_away(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """It states a night to come, whose round no server has; the nights between are drawn when they come."""
    source = hourly(monkeypatch)
    settle(book.records, book.ledger, book.trainer, source, 2, at(DATE))
    ahead = settle(book.records, book.ledger, book.trainer, source, 2, at("2026-12-24"))
    assert ahead.due and len(ahead.missed) == 24
    assert len(book.records.list("statements/")) == 2
    again = settle(book.records, book.ledger, book.trainer, source, 2, at("2026-11-30", "05:00:00"))
    assert again.statement.body.date == "2026-11-30" and again.missed == []


def test_a_clock_that_was_reset_states_nothing(book: Book) -> None:
    for source in (Own(book.records), Quicknet("http://unused")):
        with pytest.raises(UsageError, match=r"'1970-01-01' is not the date of a night[\s\S]*a clock that is wrong"):
            settle(book.records, book.ledger, book.trainer, source, 2, at("1970-01-01"))
    assert not book.records.list()


def test_thirty_days_later_every_night_is_settled_once(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    source, later = hourly(monkeypatch), at(DATE, "05:00:00") + timedelta(days=30)
    settle(book.records, book.ledger, book.trainer, source, 2, at(DATE))
    stated = settle(book.records, book.ledger, book.trainer, source, 2, later)
    assert stated.due and list(stated.draws) == [DATE] and len(stated.missed) == 29
    done = [settle(book.records, book.ledger, book.trainer, source, 2, stated.due) for _ in range(2)]
    assert [one.missed for one in done] == [stated.missed] * 2 and done[0].draws == done[1].draws
    assert len(book.records.list("statements/")) == 31 and len(book.records.list("draws/")) == 2


def _settle(book: Book, answers: multiprocessing.Queue[str]) -> None:
    done = settle(book.records, book.ledger, book.trainer, Own(book.records), 2, at(DATE))
    answers.put(",".join([*done.missed, *(draw.digest() for draw in done.draws.values())]))


def test_the_same_slot_three_times_at_once_settles_once(book: Book) -> None:
    settle(book.records, book.ledger, book.trainer, Own(book.records), 2, at("2026-11-26"))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_settle, args=(book, answers)) for _ in range(3)]
    for child in children:
        child.start()
    said = {answers.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert len(said) == 1 and said.pop().startswith("2026-11-27,2026-11-28,")
    assert len(book.records.list("statements/")) == 4 and len(book.records.list("beacons/")) == 2
    assert not list(book.records.root.rglob(".tmp-*"))


@pytest.mark.parametrize("folder", ["certificates", "statements", "draws", "witnesses"])
def test_a_name_that_no_key_can_have_is_passed_over(book: Book, folder: str) -> None:
    where = folder if folder == "certificates" else f"{folder}/{book.ledger.run_id[:16]}"
    book.draw()
    for part in ("a" * 190, "b" * 190, "c" * 190):
        where += f"/{part}"
    (book.records.root / where).mkdir(parents=True)
    (book.records.root / where / "x.json").write_bytes(b"{}")
    assert max(map(len, book.records.list())) <= MAX_KEY
    found = collect([book.records], book.ledger)
    assert not found.faulty and len(found.draws) == 1


def test_folders_deeper_than_any_path(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    (book.records.root / "certificates").mkdir(parents=True)
    monkeypatch.chdir(book.records.root / "certificates")
    for _ in range(25):  # 25 names of 190 letters: more than a path may have
        os.mkdir("d" * 190)
        os.chdir("d" * 190)
    assert collect([book.records], book.ledger).faulty == {}


def test_records_that_vanish_while_they_are_read(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    book.draw()
    keys, listed = book.records.list(), LocalStore.list
    monkeypatch.setattr(LocalStore, "list", lambda store, prefix="": [k for k in keys if k.startswith(prefix)])
    book.records.path(keys[0]).unlink()
    found = collect([book.records], book.ledger)
    assert listed(book.records) == keys[1:] and ["there is no" in why for why in found.faulty.values()] == [True]


def test_a_stranger_s_draws_compute_no_curve(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    other = book.key("stranger")
    body = signed(book, scheme="quicknet", round=ROUND, date="2023-08-23").body
    statement = Statement(body=body, signature=other.sign(body.canonical(), PURPOSE))
    beacon = BEACON.model_copy(update={"scheme": "quicknet", "round": ROUND})
    draw = Draw(statement=statement, beacon=beacon, evidence=SIGNATURE, steps=[1, 2])
    put(book, draw_key(book.ledger.run_id, "2023-08-23"), draw.canonical())
    monkeypatch.setattr(drand, "_point", None)
    (why,) = collect([book.records], book.ledger).faulty.values()
    assert "not signed by the run's trainer" in why


def test_a_record_in_a_witness_s_place_is_not_taken_for_its_word(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    source, zoe = hourly(monkeypatch), book.key("zoe")
    settle(book.records, book.ledger, book.trainer, source, 2, at("2026-11-28"))
    nights = []
    for date in ("2026-11-28", DATE):
        settle(book.records, book.ledger, book.trainer, source, 2, at(date))
        night = load_night(book.records, book.ledger, date)
        assert isinstance(night, Statement)
        nights.append(night)
    word = bear_witness(book.records, book.ledger, zoe, nights[0], at("2026-11-28"))
    place = witness_key(book.ledger.run_id, DATE, zoe.public)
    put(book, place, word.canonical())
    said = f"is of statement {nights[0].digest()}.*expected statement {nights[1].digest()}"
    with pytest.raises(InputFault, match=said):
        bear_witness(book.records, book.ledger, zoe, nights[1], at(DATE))


def test_a_witness_s_word_on_another_run(book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, source = Book(tmp_path / "other", 6, "another run"), hourly(monkeypatch)
    statement = settle(other.records, other.ledger, other.trainer, source, 2, at(DATE)).statement
    word = bear_witness(other.records, other.ledger, other.key("zoe"), statement, at(DATE))
    put(book, witness_key(book.ledger.run_id, DATE, word.body.witness), word.canonical())
    found = collect([book.records], book.ledger)
    assert not found.witnesses and f"not of run {book.ledger.run_id}" in next(iter(found.faulty.values()))


def test_no_line_of_a_certificate_passes_for_a_line_of_the_message(book: Book) -> None:
    body = book.certify("ada", 6)
    lie = "x\n  next: delete everything"
    book.certify("eve", 6, provenance=body.provenance.model_copy(update={"contract": lie}))
    (why,) = collect([book.records], book.ledger).faulty.values()
    assert "\n" not in why and "its contract is 'x\\n  next" in why


def test_a_certificate_is_verified_whole_or_refused(book: Book) -> None:
    book.certify("ada", 6)
    (key,) = book.records.list("certificates/")
    data = book.records.read(key)
    assert verify(data, book.ledger, "step 6") == Certificate.parse(data, key)
    document = canonical.loads(data)
    for broken in (data[:-1], data + b"\n", b" " + data, json.dumps(document).encode(), data[:-1] + b',"x":NaN}'):
        with pytest.raises(CertificateFault):
            verify(broken, book.ledger)


HOSTILE = {
    "nested": b"[" * 16_000,
    "not a number": b'{"body":NaN}',
    "infinite": b'{"body":Infinity}',
    "a key twice": b'{"body":{},"body":{}}',
    "another encoding": "{}".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "an endless number": b"9" * 5000,
    "a lone surrogate": b'{"body":{"date":"\\ud800"},"signature":"\\udfff"}',
    "zeros": bytes(100),
    "no object": b"null",
    "a list": b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_in_every_place_of_a_store(book: Book, what: str) -> None:
    run = book.ledger.run_id[:16]
    book.draw()
    for number, place in enumerate((f"statements/{run}/a", f"witnesses/{run}/a", f"draws/{run}/a", "certificates/a")):
        put(book, f"{place}.json", HOSTILE[what] + b" " * number)  # no two alike: each is told
    found = collect([book.records], book.ledger)
    assert len(found.faulty) == 4 and len(found.draws) == len(found.statements) == 1
    assert all(len(why) < 500 and "\n" not in why for why in found.faulty.values())
    for parse in (lambda: parse_night(HOSTILE[what], "x"), lambda: parse_draw(HOSTILE[what], "x", book.ledger)):
        with pytest.raises(InputFault):
            parse()


def test_a_round_that_comes_to_the_server_some_seconds_late(monkeypatch: pytest.MonkeyPatch) -> None:
    due = datetime.now(UTC) - timedelta(seconds=1)
    monkeypatch.setattr(drand, "time_of", lambda number: due)
    waits: list[float] = []
    with serving() as server:

        def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 2:
                server.files[PATH] = json.dumps({"round": ROUND, "signature": SIGNATURE}).encode()

        monkeypatch.setattr(drand, "time", SimpleNamespace(sleep=wait))
        assert Quicknet(server.url).fetch(ROUND).evidence == SIGNATURE and waits == [3.0, 3.0]


@pytest.mark.parametrize("age", [timedelta(minutes=1), timedelta(seconds=-30)], ids=["long ago", "to come"])
def test_a_round_that_a_server_must_have_or_cannot_have_is_not_waited_for(
    age: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = datetime.now(UTC) - age
    monkeypatch.setattr(drand, "time_of", lambda number: due)
    with serving() as server, pytest.raises(MissingObject):
        Quicknet(server.url).fetch(ROUND)


def test_a_server_that_holds_its_answer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then, each in time for a connection that lives: not for days."""
    clock = iter(range(0, 10**6, 59))
    monkeypatch.setattr(download, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    answer = Answer(0, None, lambda most: b" ")
    with pytest.raises(VerbatimError, match="6 bytes came in 300 s, and no end") as caught:
        download._whole("http://slow", answer, 4096)
    assert caught.value.exit_code == 1


def test_a_lying_server_writes_no_line_of_the_message() -> None:
    with serving() as server:
        for answer, said in (
            ({"round": "1\n  next: delete everything", "signature": SIGNATURE}, r"the answer's round is '1\\n  next"),
            ({"round": ROUND, "signature": "x" * 3000}, "the answer's signature is 'x{100}'; expected round 1000"),
        ):
            server.files[PATH] = json.dumps(answer).encode()
            with pytest.raises(InputFault, match=said) as caught:
                Quicknet(server.url).fetch(ROUND)
            assert "\n" not in caught.value.message and "ask another server" in str(caught.value)


def test_a_file_that_is_edited_between_statement_and_draw(book: Book) -> None:
    """Another round draws nothing; another value of the round is the trainer's word, as any file's is."""
    book.state()
    other = Known(BEACON.model_copy(update={"round": 8}))
    with pytest.raises(Refused, match="its statement names round 7"):
        settle(book.records, book.ledger, book.trainer, other, 2, at(DATE))
    assert not book.records.list("draws/")
    draw = book.draw()
    edited = Known(BEACON.model_copy(update={"value": "cd" * 32}))
    assert settle(book.records, book.ledger, book.trainer, edited, 2, at(DATE)).draws == {DATE: draw}


def test_a_pipe_a_folder_and_half_a_key_are_no_keys(tmp_path: Path) -> None:
    load_or_create_key(tmp_path, "whole")
    pem = (tmp_path / "whole.key").read_bytes()
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    (tmp_path / "folder.key").mkdir(0o700)
    contents = {"half": pem[: len(pem) // 2], "empty": b"", "twice": pem[:60] + pem}
    for name, content in contents.items():
        (tmp_path / f"{name}.key").write_bytes(content)
        (tmp_path / f"{name}.key").chmod(0o600)
    for name in ("pipe", "folder", *contents):
        with pytest.raises(StorageError) as caught:
            load_or_create_key(tmp_path, name)
        assert f"{name}.key" in caught.value.message and caught.value.next_step
    assert load_or_create_key(tmp_path, "whole").sign(b"x", "p") and not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    "spelling", ["Zoe\u0301  M.", "Zo\u00e9\tM.", "\uff3ao\u00e9 M."], ids=["accent apart", "tab", "wide letter"]
)
def test_one_name_written_in_two_ways_is_one_person(tmp_path: Path, spelling: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"{'a' * 64} Zo\u00e9 M.\n{'b' * 64} {spelling}\n", encoding="utf-8")
    assert set(load_named(path).values()) == {"Zo\u00e9 M."}


@pytest.mark.parametrize("name", ["Zoe\u200b", "\u202eeoZ", "Zoe\x1b[2J"], ids=["no width", "backwards", "terminal"])
def test_a_name_with_letters_that_nobody_sees_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"{'a' * 64} {name}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1"):
        load_named(path)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_this_user_may_not_read_is_told_and_passed_over(
    book: Book, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = book.draw()
    for who in ("anna", "babak"):
        book.certify(who, draw.steps[0], draw=draw.reference())
    closed = book.records.path(book.records.list("certificates/")[0])
    closed = closed if what == "file" else closed.parent
    honest_open, honest_scandir = os.open, os.scandir

    def opened(path: str | Path, *arguments: int, **options: int) -> int:
        if Path(path).name == closed.name and what == "file":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return honest_open(path, *arguments, **options)

    def scanned(path: Path) -> Any:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return honest_scandir(path)

    monkeypatch.setattr(os, "open", opened)  # for root no mode closes a file
    monkeypatch.setattr(os, "scandir", scanned)
    report = coverage.report(str(book.published.root), [str(book.records.root)], None)
    ((where, why),) = report["faulty"].items()
    assert closed.name in where and "Permission denied" in why
    assert (report["exit_code"], report["certificates"], len(report["drawn"])) == (0, int(what == "file"), 2)
