"""Attacks on sampling: each beside the night that nobody attacked, each with the exact verdict that a reader gets.

The trainer attacks: it wants other steps audited than the beacon's, or none. A witness keeps a store of its own, and
`coverage` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.coverage import report
from storage.audit.beacon import Value
from storage.audit.draw import Draw, draw_key, make_draw, parse_draw
from storage.audit.settle import draw_once, settle
from storage.audit.statement import (
    Statement,
    admit_missed,
    announce,
    check_together,
    parse_night,
    round_is_out,
    statement_key,
)
from storage.audit.witness import bear_witness
from storage.errors import Equivocation, InputFault, Refused
from storage.store import LocalStore
from tests.storage.drawn import DATE, Book, at, hourly, resigned

BEFORE, AFTER = at(DATE, "03:00:00"), at(DATE, "05:00:00")  # the round comes out at four


class Night(Book):
    """One night: stated at three, witnessed, drawn at five."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.source, self.witness = hourly(patch), LocalStore(folder / "witness")
        self.patch = patch

    def stated(self) -> Statement:
        night = announce(self.records, self.ledger, self.trainer, DATE, 3, self.source, BEFORE)
        assert isinstance(night, Statement)
        return night

    def witnessed(self) -> Statement:
        statement = self.stated()
        bear_witness(self.witness, self.ledger, self.key("zoe"), statement, BEFORE)
        return statement

    def drawn(self) -> Draw:
        return draw_once(self.records, self.ledger, self.witnessed(), self.source, AFTER)

    def place(self, statement: Statement) -> LocalStore:
        """A store in which this is the night's statement."""
        other = LocalStore(self.folder / f"of {statement.digest()[:8]}")
        other.create(statement_key(self.ledger.run_id, DATE), statement.canonical())
        return other

    def forget(self) -> None:
        """The trainer removes the night from its own records."""
        for key in (statement_key(self.ledger.run_id, DATE), draw_key(self.ledger.run_id, DATE)):
            self.records.path(key).unlink(missing_ok=True)

    def report(self, *more: LocalStore, now: datetime = AFTER) -> dict[str, Any]:
        """What a reader who counts zoe and ada is told."""
        named = self.folder / "named.txt"
        people = self.named("zoe", "ada", "ben") | {self.key("ada-again").public: "ada"}  # who has two keys
        lines = [f"{key} {name}\n" for key, name in people.items()]
        named.write_text("".join(lines), encoding="utf-8")
        clock = type("Clock", (), {"now": staticmethod(lambda zone: now)})
        self.patch.setattr("flows.coverage.datetime", clock)
        stores = [str(store.root) for store in (self.records, self.witness, *more)]
        found = report(str(self.published.root), stores, named)
        json.dumps(found)
        return found

    def verdict(self, *more: LocalStore, now: datetime = AFTER) -> tuple[int, list[str]]:
        """Exit code and kinds of what counts against the run."""
        found = self.report(*more, now=now)
        return found["exit_code"], [finding["kind"] for finding in found["findings"]]


def said(verdict: tuple[int, list[str]]) -> str:
    """What the list of attacks calls it."""
    code, kinds = verdict
    return f"{', '.join(kinds) or 'nothing against the run'} ({code})"


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    return Night(tmp_path, monkeypatch)


def test_the_unattacked_night(night: Night, ends: Callable[[str], None]) -> None:
    draw = night.drawn()
    found = night.report()
    assert (found["exit_code"], found["findings"], found["faulty"]) == (0, [], {})
    assert [(row["step"], row["state"], row["basis"]) for row in found["drawn"]] == [
        (step, "due", "witnessed by zoe") for step in draw.steps
    ]
    ends(said(night.verdict()))


def test_two_ledgers_for_one_run(night: Night, ends: Callable[[str], None]) -> None:
    draw = night.drawn()
    forged = resigned(draw.statement, night.trainer, head="5" * 64)
    assert night.verdict() == (0, [])
    ends(said(night.verdict(night.place(forged))))
    check_together([draw.statement, draw.statement], night.ledger)
    with pytest.raises(Equivocation, match="the run's trainer signed both") as caught:
        check_together([draw.statement, forged], night.ledger)
    assert caught.value.exit_code == 11


def test_heads_ground_after_the_beacon(night: Night, ends: Callable[[str], None]) -> None:
    """The trainer waits for the value, makes heads until the draw suits it, and dates the statement back."""
    statement = night.stated()
    assert round_is_out(statement.body, AFTER)
    with pytest.raises(Refused, match="may have been made after it") as caught:
        bear_witness(night.witness, night.ledger, night.key("zoe"), statement, AFTER)
    assert caught.value.exit_code == 13
    draw_once(night.records, night.ledger, statement, night.source, AFTER)
    found = night.report()
    assert {row["basis"] for row in found["drawn"]} == {"trainer's word"} and found["exit_code"] == 0
    ends(f"no witness: refused ({caught.value.exit_code})")


def test_heads_ground_after_the_beacon_beside_the_witnessed_one(night: Night, ends: Callable[[str], None]) -> None:
    statement = night.witnessed()
    night.forget()
    ground = resigned(statement, night.trainer, step=11, head=night.ledger.link(11))
    draw = make_draw(night.records, night.ledger, ground, night.source.fetch(ground.body.round), AFTER)
    found = night.report()
    ends(said((found["exit_code"], [f["kind"] for f in found["findings"]])))
    assert {row["basis"] for row in found["drawn"]} == {"trainer's word"} and draw.body.step == 11


@pytest.mark.parametrize("shift", [-1, 1, None], ids=["earlier", "later", "missing"])
def test_a_draw_with_a_missing_or_wrong_round(night: Night, shift: int | None, ends: Callable[[str], None]) -> None:
    statement = night.witnessed()
    if shift is None:
        with pytest.raises(Refused, match="comes out at"):
            make_draw(night.records, night.ledger, statement, night.source.fetch(statement.body.round), BEFORE)
        ends(said(night.verdict()))
        return
    other = night.source.fetch(statement.body.round + shift)
    with pytest.raises(Refused, match="cannot draw for") as caught:
        make_draw(night.records, night.ledger, statement, other, AFTER)
    assert caught.value.exit_code == 13
    honest = night.drawn()
    forged = honest.model_copy(update={"beacon": other.beacon, "evidence": other.evidence})
    with pytest.raises(InputFault, match="but its statement names round"):
        parse_draw(forged.canonical(), "draw", night.ledger)
    night.records.path(draw_key(night.ledger.run_id, DATE)).write_bytes(forged.canonical())
    found = night.report()
    assert (len(found["faulty"]), found["drawn"]) == (1, [])
    ends(said((found["exit_code"], [finding["kind"] for finding in found["findings"]])))


def test_a_value_that_is_not_the_beacon_s(night: Night) -> None:
    statement = night.witnessed()
    value = night.source.fetch(statement.body.round)
    forged = Value(value.beacon.model_copy(update={"value": "5" * 64}), "")
    with pytest.raises(InputFault, match="not the value of this hour") as caught:
        make_draw(night.records, night.ledger, statement, forged, AFTER)
    assert caught.value.exit_code == 11
    make_draw(night.records, night.ledger, statement, value, AFTER)
    assert night.verdict() == (0, [])


@pytest.mark.parametrize("changes", [{"count": 1}, {"round": 1}], ids=["fewer steps", "the next round"])
def test_a_redraw(night: Night, changes: dict[str, int], ends: Callable[[str], None]) -> None:
    """The draw does not suit the trainer, so it states the night once more, for another round or fewer steps."""
    draw = night.drawn()
    body = draw.body
    updates = {name: value + (body.round if name == "round" else 0) for name, value in changes.items()}
    again = resigned(draw.statement, night.trainer, **updates)
    with pytest.raises(Equivocation, match="two statements") as caught:
        bear_witness(night.witness, night.ledger, night.key("zoe"), again, BEFORE)
    assert caught.value.exit_code == 11
    night.forget()
    later = AFTER + timedelta(hours=1)
    make_draw(night.records, night.ledger, again, night.source.fetch(again.body.round), later)
    ends(said(night.verdict(now=later)))


def test_a_dropped_unfavourable_draw(night: Night, ends: Callable[[str], None]) -> None:
    night.drawn()
    assert night.verdict() == (0, [])
    night.forget()
    ends(said(night.verdict()))


def test_a_night_called_missed_after_its_beacon(night: Night, ends: Callable[[str], None]) -> None:
    night.witnessed()
    night.forget()
    tomorrow = AFTER + timedelta(days=1)
    admit_missed(night.records, night.ledger, night.trainer, DATE, tomorrow)
    ends(said(night.verdict(now=tomorrow)))


def test_a_night_that_was_really_missed(night: Night) -> None:
    """The twin of the former: nobody stated it, and the next nights are in order."""
    night.drawn()
    later = AFTER + timedelta(days=2)
    settled = settle(night.records, night.ledger, night.trainer, night.source, 3, later)
    assert settled.due and settled.missed == ["2026-11-30"]
    settle(night.records, night.ledger, night.trainer, night.source, 3, settled.due)
    assert night.verdict(now=later) == (0, ["missed"])
    data = night.records.read(statement_key(night.ledger.run_id, "2026-11-30"))
    assert parse_night(data, "night").body.kind == "missed"


def test_two_keys_of_one_person(night: Night, ends: Callable[[str], None]) -> None:
    """Two keys under one name are one; two that a reader takes for two people are what the reader says."""
    step = night.drawn().steps[0]
    night.certify("ada", step)
    night.certify("ada-again", step, "nvidia")
    (state,) = [row["state"] for row in night.report()["drawn"] if row["step"] == step]
    night.certify("ben", step, "nvidia")
    assert [row["state"] for row in night.report()["drawn"] if row["step"] == step] == ["confirmed"]
    ends(f"{state}, not confirmed")


def test_a_trainer_that_witnesses_itself(night: Night) -> None:
    statement = night.stated()
    with pytest.raises(Refused, match="its own witness"):
        bear_witness(night.witness, night.ledger, night.trainer, statement, BEFORE)
    bear_witness(
        night.witness, night.ledger, night.key("a second key of the trainer".replace(" ", "-")), statement, BEFORE
    )
    draw_once(night.records, night.ledger, statement, night.source, AFTER)
    assert {row["basis"] for row in night.report()["drawn"]} == {"seen by keys without a name"}
