"""States of drawn steps, what counts against a run, and what is proven: from real certificates and records."""

from datetime import timedelta
from math import comb
from pathlib import Path
from typing import Any

import pytest

from storage.audit import states
from storage.audit.certificate import Certificate, save_certificate, sign
from storage.audit.collect import Evidence, collect
from storage.audit.coverage import Proven, detection, first_for, proven, smallest_found
from storage.audit.draw import Draw
from storage.audit.keys import Key, load_or_create_key
from storage.audit.named import load_named
from storage.audit.replay import audit_step
from storage.audit.settle import settle
from storage.audit.statement import PURPOSE, Missed, Statement, admit_missed, announce, statement_key
from storage.audit.states import Audited, DrawnStep, Finding, copies, drawn_steps, findings, opened
from storage.audit.witness import bear_witness
from storage.errors import UsageError
from storage.ledger import Ledger
from storage.store import LocalStore, MemoryStore, Store
from tests.storage.conftest import Small, flip
from tests.storage.drawn import at, drawn, hourly, stated

DATE = "2026-11-20"
SOON, LATE = at("2026-11-26"), at("2026-11-27")


class Scene:
    """A published run, a folder of records, and as many keys as are asked for."""

    def __init__(self, made: Small, folder: Path) -> None:
        self.made, self.folder = made, folder
        self.ledger = Ledger(made.published)
        self.records = MemoryStore(str(folder))

    def key(self, name: str) -> Key:
        return load_or_create_key(self.folder / "people", name)

    def named(self, *names: str) -> dict[str, str]:
        return {self.key(name).public: name for name in names}

    def audit(self, name: str, step: int, backend: str = "cpu", draw: Draw | None = None) -> bytes:
        """A genuine certificate; the stand-in model runs on one backend, so another one is written in by its signer."""
        data = audit_step(self.made.published, step, "cpu", self.key(name), draw).certificate
        assert data
        body = Certificate.parse(data, "certificate").body
        used = body.provenance.model_copy(update={"backend": backend})
        data = sign(body.model_copy(update={"provenance": used}), self.key(name))
        save_certificate(self.records, data)
        return data

    def evidence(self, *more: Store) -> Evidence:
        return collect([self.records, *more], self.ledger)

    def rows(self, *names: str, now: Any = SOON) -> list[DrawnStep]:
        return drawn_steps(self.evidence(), self.ledger, self.named(*names), opened(self.made.published), now)

    def kinds(self, *more: Store, now: Any = SOON) -> list[tuple[str, str]]:
        return [(found.kind, found.date) for found in findings(self.evidence(*more), {}, now)]


@pytest.fixture
def scene(made: Small, tmp_path: Path) -> Scene:
    return Scene(made, tmp_path)


def forged(statement: Statement, key: Key, **changes: object) -> Statement:
    body = statement.body.model_copy(update=changes)
    return Statement(body=body, signature=key.sign(body.canonical(), PURPOSE))


def test_a_drawn_step_is_due_until_its_deadline_and_then_unanswered_or_overdue(scene: Scene) -> None:
    steps = drawn(scene.records, scene.ledger, scene.made.key, DATE, 12).steps
    assert steps == list(range(12)) and {row.state for row in scene.rows()} == {"due"}
    late = {row.step: row.state for row in scene.rows(now=LATE)}
    assert opened(scene.made.published) == {0, 5, 10, 12}
    assert late == {step: "overdue" if step in (0, 5, 10) else "unanswered" for step in range(12)}
    scene.made.published.create("openings/3.json", b"{}")
    assert {row.step: row.state for row in scene.rows(now=LATE)}[3] == "overdue"
    assert {row.basis for row in scene.rows()} == {"trainer's word"}


def test_one_named_key_attests_two_on_two_backends_confirm(scene: Scene) -> None:
    drawn(scene.records, scene.ledger, scene.made.key, DATE, 12)

    def state(*names: str) -> list[tuple[str, int]]:
        return [(row.state, row.unlisted) for row in scene.rows(*names) if row.step == 6]

    assert state("ada") == [("due", 0)]
    scene.audit("ada", 6)
    assert state() == [("due", 1)] and state("ada") == [("attested", 0)]
    scene.audit("ada", 6, "nvidia")
    assert state("ada") == [("attested", 0)]  # one key, two backends
    scene.audit("ben", 6)
    assert state("ben") == [("attested", 2)]
    assert state("ada", "ben") == [("confirmed", 0)]  # ben's cpu, ada's nvidia


def test_two_on_one_backend_are_one_kind_of_machine(scene: Scene) -> None:
    drawn(scene.records, scene.ledger, scene.made.key, DATE, 12)
    for name, backend in (("ada", "cpu"), ("ben", "checked:cpu")):
        scene.audit(name, 6, backend)
    assert [row.state for row in scene.rows("ada", "ben") if row.step == 6] == ["attested"]


def test_two_keys_of_one_person_count_once(scene: Scene) -> None:
    drawn(scene.records, scene.ledger, scene.made.key, DATE, 12)
    scene.audit("ada", 6)
    scene.audit("adas-second", 6, "nvidia")
    named = dict.fromkeys(scene.named("ada", "adas-second"), "Ada")
    audited = Audited.of(scene.evidence().certificates, named, 12)
    assert audited.level(6) == "attested"
    assert Audited.of(scene.evidence().certificates, scene.named("ada", "adas-second"), 12).level(6) == "confirmed"


def test_a_step_passed_on_the_way_is_compared_too(scene: Scene) -> None:
    scene.audit("ada", 7)
    audited = Audited.of(scene.evidence().certificates, scene.named("ada"), 12)
    assert [step for step in range(12) if audited.level(step) == "attested"] == [5, 6, 7]


def test_a_no_match_of_a_named_key_disputes_the_step(scene: Scene, made: Small) -> None:
    scene.audit("ada", 7)
    body = Certificate.parse(scene.audit("ben", 7, "nvidia"), "certificate").body
    assert not isinstance(body.reproduced, str)
    other = body.reproduced.model_copy(update={"loss": "3f800000"})
    save_certificate(
        scene.records, sign(body.model_copy(update={"verdict": "no-match", "reproduced": other}), scene.key("ben"))
    )
    certificates = scene.evidence().certificates
    assert Audited.of(certificates, scene.named("ada"), 12).level(7) == "attested"
    both = Audited.of(certificates, scene.named("ada", "ben"), 12)
    assert [both.level(step) for step in (5, 6, 7)] == ["confirmed", "confirmed", "disputed"]


def test_a_copied_proof_counts_for_nobody_among_the_named_and_harms_nobody_from_outside(scene: Scene) -> None:
    body = Certificate.parse(scene.audit("ada", 6), "certificate").body
    thief = scene.key("thief")
    save_certificate(scene.records, sign(body.model_copy(update={"auditor": thief.public}), thief))
    certificates = scene.evidence().certificates
    assert Audited.of(certificates, scene.named("ada"), 12).level(6) == "attested"
    assert Audited.of(certificates, scene.named("ada", "thief"), 12).level(6) == ""
    keys = " and ".join(sorted([thief.public, scene.key("ada").public]))
    assert copies(certificates) == [f"keys {keys} show one proof of replay"]


def test_whom_a_draw_rests_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    source, key = hourly(monkeypatch), scene.made.key
    statement = settle(scene.records, scene.ledger, key, source, 2, at(DATE)).statement
    settle(scene.records, scene.ledger, key, source, 2, at(DATE, "05:00:00"))
    assert {row.basis for row in scene.rows("zoe")} == {"trainer's word"}
    bear_witness(scene.records, scene.ledger, scene.key("zoe"), statement, at(DATE, "03:01:00"))
    assert {row.basis for row in scene.rows("zoe")} == {"witnessed by zoe"}
    assert {row.basis for row in scene.rows()} == {"witnessed by keys without a name"}
    same = {scene.key("zoe").public: "Zoe", key.public: "Zoe"}  # the trainer by another key
    rows = drawn_steps(scene.evidence(), scene.ledger, same, frozenset(), SOON)
    assert {row.basis for row in rows} == {"trainer's word"}


def test_a_statement_without_a_draw_counts_against_the_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    source, witness = hourly(monkeypatch), MemoryStore(f"{scene.folder}/witness")
    statement = announce(scene.records, scene.ledger, scene.made.key, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    bear_witness(witness, scene.ledger, scene.key("zoe"), statement, at(DATE))
    assert scene.kinds(witness, now=at(DATE)) == []
    dropped = MemoryStore(f"{scene.folder}/emptied")  # the trainer removed what it did not like; the witness has it
    found = findings(collect([dropped, witness], scene.ledger), {}, at(DATE, "05:00:00"))
    assert [(finding.kind, finding.date) for finding in found] == [("dropped", DATE)]
    settle(scene.records, scene.ledger, scene.made.key, source, 2, at(DATE, "05:00:00"))
    assert scene.kinds(witness, now=at(DATE, "05:00:00")) == []


def test_a_file_s_statement_is_dropped_when_its_night_is_over(scene: Scene) -> None:
    stated(scene.records, scene.ledger, scene.made.key, DATE)
    assert scene.kinds(now=at(DATE, "23:59:59")) == []
    assert scene.kinds(now=at("2026-11-21", "00:00:00")) == [("dropped", DATE)]


def test_missed_nights_are_counted_between_statements(scene: Scene) -> None:
    drawn(scene.records, scene.ledger, scene.made.key, DATE)
    assert scene.kinds(now=at("2026-11-22")) == [("missed", "2026-11-21")]
    admit_missed(scene.records, scene.ledger, scene.made.key, "2026-11-21", at("2026-11-22"))
    assert scene.kinds(now=at("2026-11-22")) == [("missed", "2026-11-21")]
    drawn(scene.records, scene.ledger, scene.made.key, "2026-11-22")
    assert scene.kinds(now=at("2026-11-23")) == [("missed", "2026-11-21")]


def test_a_night_called_missed_after_its_beacon(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, source = MemoryStore(f"{scene.folder}/witness"), hourly(monkeypatch)
    statement = announce(MemoryStore(f"{scene.folder}/x"), scene.ledger, scene.made.key, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    bear_witness(witness, scene.ledger, scene.key("zoe"), statement, at(DATE))
    night = admit_missed(scene.records, scene.ledger, scene.made.key, DATE, at("2026-11-21"))
    assert isinstance(night, Missed) and ("called missed", DATE) not in scene.kinds(now=at("2026-11-21"))
    assert scene.kinds(witness, now=at("2026-11-21")) == [("called missed", DATE), ("dropped", DATE)]


def test_a_second_statement_of_a_night_is_found_whoever_holds_it(scene: Scene) -> None:
    statement = drawn(scene.records, scene.ledger, scene.made.key, DATE).statement
    for changes in ({"round": 9}, {"count": 1}):
        other = MemoryStore(f"{scene.folder}/{changes}")
        other.create(statement_key(scene.ledger.run_id, DATE), forged(statement, scene.made.key, **changes).canonical())
        assert ("two statements", DATE) in scene.kinds(other)


def test_two_histories_are_proven_by_the_trainer_s_signatures(scene: Scene) -> None:
    statement = drawn(scene.records, scene.ledger, scene.made.key, DATE).statement
    other = MemoryStore(f"{scene.folder}/other")
    place = statement_key(scene.ledger.run_id, DATE)
    other.create(place, forged(statement, scene.key("enemy"), head="0" * 64).canonical())
    assert scene.kinds(other, now=at(DATE)) == [] and len(scene.evidence(other).faulty) == 1
    proof = MemoryStore(f"{scene.folder}/proof")
    proof.create(place, forged(statement, scene.made.key, head="0" * 64).canonical())
    assert scene.kinds(proof, now=at(DATE)) == [("two histories", "")]


def test_a_redraw_with_an_exchanged_file(scene: Scene) -> None:
    draw = drawn(scene.records, scene.ledger, scene.made.key, DATE)
    scene.audit("ada", draw.steps[0], draw=draw)
    again, other = MemoryStore(f"{scene.folder}/again"), draw.beacon.model_copy(update={"value": "cd" * 32})
    second = drawn(again, scene.ledger, scene.made.key, DATE, beacon=other)
    assert second != draw and ("redrawn", DATE) in scene.kinds(again)
    for certificate in scene.records.list("certificates/"):
        again.create(certificate, scene.records.read(certificate))
    alone = collect([again], scene.ledger)  # the first draw is gone, but a certificate names it
    assert [found.kind for found in findings(alone, {}, at(DATE))] == []
    says = f"a certificate names draw {draw.digest()}, the record is {second.digest()}"
    assert findings(alone, scene.named("ada"), at(DATE)) == [Finding("redrawn", DATE, says)]


def test_records_that_do_not_check_out_are_told_and_count_for_nothing(scene: Scene, tmp_path: Path) -> None:
    draw, damaged = drawn(scene.records, scene.ledger, scene.made.key, DATE), LocalStore(tmp_path / "damaged")
    scene.audit("ada", draw.steps[0], draw=draw)
    whole = scene.evidence()
    for key in scene.records.list():
        damaged.create("audits/" + key, scene.records.read(key))
        flip(damaged.path("audits/" + key), 100)
    found = collect([damaged], scene.ledger)
    assert len(found.faulty) == 3 and all("damaged" in where and why for where, why in found.faulty.items())
    assert (found.statements, found.draws, found.certificates) == ([], [], [])
    again = collect([scene.records, damaged, scene.records], scene.ledger)
    assert (again.draws, again.certificates) == (whole.draws, whole.certificates)


def test_the_file_of_named_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"# whom I count\n{'a' * 64} Ada L.\n\n{'b' * 64}\tBen # from the lab\n", encoding="utf-8")
    assert load_named(path) == {"a" * 64: "Ada L.", "b" * 64: "Ben"}
    for line in (f"{'a' * 64}", f"{'A' * 64} Ada", "a" * 63 + " Ada", f"{'c' * 64} Cy\n{'c' * 64} Di"):
        path.write_text(line, encoding="utf-8")
        with pytest.raises(UsageError, match=r"line \d: .* is no key with a name"):
            load_named(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_named(tmp_path / "none")


def test_what_so_many_audits_prove() -> None:
    assert detection(0, 100, 5) == 0 and detection(100, 100, 1) == 1 and detection(1, 2, 2) == 0.75
    assert smallest_found(0, 100) is None and smallest_found(100, 100) == 1
    for audited, steps in ((1, 2), (1, 40), (3, 40), (39, 40), (10, 1000), (100, 80957), (5000, 80957)):
        bad = smallest_found(audited, steps)
        assert bad and 20 * (steps - audited) ** bad <= steps**bad
        assert bad == 1 or 20 * (steps - audited) ** (bad - 1) > steps ** (bad - 1)
    without = 1 - comb(95, 10) / comb(100, 10)  # drawn without return, as one draw does: never worse
    assert detection(10, 100, 5) <= without


def test_only_drawn_steps_that_were_answered_prove_anything_of_the_others() -> None:
    def row(step: int, state: str) -> DrawnStep:
        return DrawnStep(DATE, step, "trainer's word", state, (), (), 0)

    rows = [row(number, state) for number, state in enumerate(states.STATES)] + [row(4, "confirmed")]
    assert proven(rows, 40) == Proven(2, 40, smallest_found(2, 40))


def test_many_keys_spread_over_the_steps() -> None:
    taken = [first_for(f"{number:064x}", "0" * 64, range(10)) for number in range(2000)]
    assert set(taken) == set(range(10)) and all(140 < taken.count(step) < 260 for step in range(10))
    assert first_for("a" * 64, "0" * 64, [5]) == 5 and timedelta(days=7) == states.DEADLINE
