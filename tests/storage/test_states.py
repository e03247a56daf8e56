"""States of drawn steps, what counts against a run, and what is proven: from real certificates and records."""

from dataclasses import replace
from datetime import datetime, timedelta
from fractions import Fraction
from itertools import combinations
from math import comb, prod
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from storage import checkpoint
from storage.audit import states
from storage.audit.certificate import save_certificate, sign
from storage.audit.collect import Evidence, collect
from storage.audit.coverage import Proven, first_for, proven
from storage.audit.keys import Key
from storage.audit.named import Named, load_named
from storage.audit.settle import settle
from storage.audit.standing import standing
from storage.audit.statement import Missed, Statement, admit_missed, announce, statement_key
from storage.audit.states import Audited, DrawnStep, Finding, copies, findings
from storage.audit.witness import bear_witness, in_time
from storage.errors import Refused, UsageError
from storage.store import LocalStore, MemoryStore, Store
from tests.storage.conftest import flip
from tests.storage.drawn import DATE, Book, at, hourly, resigned

SOON, LATE = at("2026-12-05"), at("2026-12-06")


class Scene(Book):
    """A run with what is said of it, and how a reader sees it."""

    def evidence(self, *more: Store) -> Evidence:
        return collect([self.records, *more], self.ledger)

    def rows(self, *names: str, now: datetime = SOON) -> list[DrawnStep]:
        return self.rows_for(self.named(*names), now)

    def rows_for(self, named: Named, now: datetime = SOON) -> list[DrawnStep]:
        return standing(self.published, self.ledger, self.evidence(), named, now).rows

    def kinds(self, *more: Store, now: datetime) -> list[tuple[str, str]]:
        return [(found.kind, found.date) for found in findings(self.evidence(*more), {}, now)]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_drawn_step_is_due_until_its_deadline_and_then_unanswered_or_overdue(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = scene.draw(count=12).steps
    assert steps == list(range(12)) and {row.state for row in scene.rows()} == {"due"}
    assert {row.state for row in scene.rows(now=LATE)} == {"unanswered"}
    for step in (0, 5, 10):
        scene.published.create(f"checkpoints/{step:08d}.json", b"{}")
    assert {row.state for row in scene.rows(now=LATE)} == {"unanswered"}  # the name alone answers nothing
    monkeypatch.setattr(checkpoint, "check_there", lambda *given: None)
    late = {row.step: row.state for row in scene.rows(now=LATE)}
    assert late == {step: "overdue" if step in (0, 5, 10) else "unanswered" for step in range(12)}
    scene.published.create("opened/checkpoints/00000003.json", b"{}")
    assert {row.step: row.state for row in scene.rows(now=LATE)}[3] == "overdue"
    assert {row.basis for row in scene.rows()} == {"trainer's word"}


def test_one_named_key_attests_two_on_two_backends_confirm(scene: Scene) -> None:
    scene.draw(count=12)

    def state(*names: str) -> list[tuple[str, int]]:
        return [(row.state, row.unlisted) for row in scene.rows(*names) if row.step == 6]

    assert state("ada") == [("due", 0)]
    scene.certify("ada", 6)
    assert state() == [("due", 1)] and state("ada") == [("attested", 0)]
    scene.certify("ada", 6, "nvidia")
    assert state("ada") == [("attested", 0)]  # one key, two backends
    scene.certify("ben", 6)
    assert state("ben") == [("attested", 2)]
    assert state("ada", "ben") == [("confirmed", 0)]  # ben's cpu, ada's nvidia


def test_two_on_one_backend_are_one_kind_of_machine(scene: Scene) -> None:
    scene.draw(count=12)
    for name, backend in (("ada", "cpu"), ("ben", "checked:cpu")):
        scene.certify(name, 6, backend)
    assert [row.state for row in scene.rows("ada", "ben") if row.step == 6] == ["attested"]


def test_two_keys_of_one_person_count_once(scene: Scene) -> None:
    scene.draw(count=12)
    scene.certify("ada", 6)
    scene.certify("adas-second", 6, "nvidia")
    named = dict.fromkeys(scene.named("ada", "adas-second"), "Ada")
    audited = Audited.of(scene.evidence().certificates, named, 12)
    assert audited.level(6) == "attested"
    assert Audited.of(scene.evidence().certificates, scene.named("ada", "adas-second"), 12).level(6) == "confirmed"


def test_a_step_passed_on_the_way_is_compared_too(scene: Scene) -> None:
    scene.certify("ada", 7, first=5)
    audited = Audited.of(scene.evidence().certificates, scene.named("ada"), 12)
    assert [step for step in range(12) if audited.level(step) == "attested"] == [5, 6, 7]


def test_a_no_match_of_a_named_key_disputes_the_step(scene: Scene) -> None:
    scene.certify("ada", 7, first=5)
    other = scene.ledger[7].model_copy(update={"loss": "40000000"})
    scene.certify("ben", 7, "nvidia", first=5, verdict="no-match", reproduced=other)
    certificates = scene.evidence().certificates
    assert Audited.of(certificates, scene.named("ada"), 12).level(7) == "attested"
    both = Audited.of(certificates, scene.named("ada", "ben"), 12)
    assert [both.level(step) for step in (4, 5, 6, 7)] == ["", "confirmed", "confirmed", "disputed"]


def test_a_part_that_does_not_match_disputes_its_step_and_says_for_whom(scene: Scene) -> None:
    draw = scene.draw(count=12)
    one, other = "1" * 64, "2" * 64
    of = {"piece": "step 6 unit 1", "recorded": one, "draw": draw.reference(), "beacon": draw.beacon}
    scene.certify("ada", 6)
    scene.certify("ben", 6, verdict="no-match", reproduced=other, **of)
    row = next(row for row in scene.rows("ada", "ben") if row.step == 6)
    assert (row.state, row.names, row.against, row.parts) == ("disputed", ("ada",), ("ben",), ())
    unnamed = next(row for row in scene.rows("ada") if row.step == 6)
    assert (unnamed.state, unnamed.against, unnamed.unlisted) == ("attested", (), 1)


def test_a_copied_proof_counts_for_nobody_among_the_named_and_harms_nobody_from_outside(scene: Scene) -> None:
    body = scene.certify("ada", 6)
    thief = scene.key("thief")
    save_certificate(scene.records, sign(body.model_copy(update={"auditor": thief.public}), thief))
    certificates = scene.evidence().certificates
    assert Audited.of(certificates, scene.named("ada"), 12).level(6) == "attested"
    assert Audited.of(certificates, scene.named("ada", "thief"), 12).level(6) == ""
    keys = " and ".join(sorted([thief.public, scene.key("ada").public]))
    assert copies(certificates) == [f"keys {keys} show one proof of replay"]


def test_whom_a_draw_rests_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    source, key = hourly(monkeypatch), scene.trainer
    statement = settle(scene.records, scene.ledger, key, source, 2, at(DATE)).statement
    settle(scene.records, scene.ledger, key, source, 2, at(DATE, "05:00:00"))
    assert {row.basis for row in scene.rows("zoe")} == {"trainer's word"}
    bear_witness(scene.records, scene.ledger, scene.key("zoe"), statement, at(DATE, "03:01:00"))
    assert {row.basis for row in scene.rows("zoe")} == {"witnessed by zoe"}
    assert {row.basis for row in scene.rows()} == {"seen by keys without a name"}
    same = {scene.key("zoe").public: "Zoe", key.public: "Zoe"}  # the trainer by another key
    assert {row.basis for row in scene.rows_for(same)} == {"trainer's word"}


def test_a_statement_without_a_draw_counts_against_the_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    source, witness = hourly(monkeypatch), MemoryStore(f"{scene.folder}/witness")
    statement = announce(scene.records, scene.ledger, scene.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    bear_witness(witness, scene.ledger, scene.key("zoe"), statement, at(DATE))
    assert scene.kinds(witness, now=at(DATE)) == []
    dropped = MemoryStore(f"{scene.folder}/emptied")  # the trainer removed what it did not like; the witness has it
    found = findings(collect([dropped, witness], scene.ledger), {}, at(DATE, "05:00:00"))
    assert [(finding.kind, finding.date) for finding in found] == [("dropped", DATE)]
    settle(scene.records, scene.ledger, scene.trainer, source, 2, at(DATE, "05:00:00"))
    assert scene.kinds(witness, now=at(DATE, "05:00:00")) == []


def test_a_file_s_statement_is_dropped_when_its_night_is_over(scene: Scene) -> None:
    scene.state()
    assert scene.kinds(now=at(DATE, "23:59:59")) == []
    assert scene.kinds(now=at("2026-11-30", "00:00:00")) == [("dropped", DATE)]


def test_missed_nights_are_counted_between_statements(scene: Scene) -> None:
    scene.draw()
    assert scene.kinds(now=at("2026-12-01")) == [("missed", "2026-11-30")]
    admit_missed(scene.records, scene.ledger, scene.trainer, "2026-11-30", at("2026-12-01"))
    assert scene.kinds(now=at("2026-12-01")) == [("missed", "2026-11-30")]
    scene.draw("2026-12-01")
    assert scene.kinds(now=at("2026-12-02")) == [("missed", "2026-11-30")]


def test_a_night_called_missed_after_its_beacon(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, source = MemoryStore(f"{scene.folder}/witness"), hourly(monkeypatch)
    statement = announce(MemoryStore(f"{scene.folder}/x"), scene.ledger, scene.trainer, DATE, 2, source, at(DATE))
    assert isinstance(statement, Statement)
    bear_witness(witness, scene.ledger, scene.key("zoe"), statement, at(DATE))
    night = admit_missed(scene.records, scene.ledger, scene.trainer, DATE, at("2026-11-30"))
    assert isinstance(night, Missed) and ("called missed", DATE) not in scene.kinds(now=at("2026-11-30"))
    assert scene.kinds(witness, now=at("2026-11-30")) == [("called missed", DATE), ("dropped", DATE)]


def test_a_second_statement_of_a_night_is_found_whoever_holds_it(scene: Scene) -> None:
    statement = scene.draw().statement
    for changes in ({"round": 9}, {"count": 1}):
        other = MemoryStore(f"{scene.folder}/{changes}")
        other.create(
            statement_key(scene.ledger.run_id, DATE), resigned(statement, scene.trainer, **changes).canonical()
        )
        assert ("two statements", DATE) in scene.kinds(other, now=at(DATE))


def test_two_histories_are_proven_by_the_trainer_s_signatures(scene: Scene) -> None:
    statement = scene.draw().statement
    other = MemoryStore(f"{scene.folder}/other")
    place = statement_key(scene.ledger.run_id, DATE)
    other.create(place, resigned(statement, scene.key("enemy"), head="0" * 64).canonical())
    assert scene.kinds(other, now=at(DATE)) == [] and len(scene.evidence(other).faulty) == 1
    proof = MemoryStore(f"{scene.folder}/proof")
    proof.create(place, resigned(statement, scene.trainer, head="0" * 64).canonical())
    assert scene.kinds(proof, now=at(DATE)) == [("two histories", "")]


def test_a_draw_by_a_file_and_a_clock_that_is_ahead_counts_for_nothing_before_its_night(scene: Scene) -> None:
    """Nothing holds such a trainer's clock, but a reader has one too."""
    ahead = (at(DATE) + timedelta(days=9)).date().isoformat()
    scene.certify("ada", scene.draw(ahead, count=12).steps[0])
    found = standing(scene.published, scene.ledger, scene.evidence(), scene.named("ada"), at(DATE))
    assert (found.rows, found.proven.audited, found.waiting, found.against) == ([], 0, [], [])
    assert [(finding.kind, finding.date) for finding in found.findings] == [("ahead", ahead)]
    then = standing(scene.published, scene.ledger, scene.evidence(), scene.named("ada"), at(ahead))
    assert {row.basis for row in then.rows} == {"trainer's word"} and len(then.rows) == 12 and not then.findings


def test_no_witness_makes_a_night_to_come_its_own(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nights could be stated before the steps that they are then to miss."""
    ahead, source = "2026-12-08", hourly(monkeypatch)
    statement = announce(scene.records, scene.ledger, scene.trainer, ahead, 1, source, at(ahead))
    assert isinstance(statement, Statement)
    with pytest.raises(Refused, match="the night of 2026-12-08 has not begun: it is 2026-12-07 23:59:59"):
        bear_witness(scene.records, scene.ledger, scene.key("zoe"), statement, at("2026-12-07", "23:59:59"))
    word = bear_witness(scene.records, scene.ledger, scene.key("zoe"), statement, at(ahead, "00:00:00"))
    assert in_time(word, statement)
    early = word.body.model_copy(update={"seen": "2026-12-07T23:59:59Z"})
    assert not in_time(word.model_copy(update={"body": early}), statement)


def test_a_redraw_with_an_exchanged_file(scene: Scene) -> None:
    draw = scene.draw()
    scene.certify("ada", draw.steps[0], draw=draw.reference(), beacon=draw.beacon)
    again, other = MemoryStore(f"{scene.folder}/again"), draw.beacon.model_copy(update={"value": "cd" * 32})
    second = scene.draw(beacon=other, records=again)
    assert second != draw and ("redrawn", DATE) in scene.kinds(again, now=at(DATE))
    for certificate in scene.records.list("certificates/"):
        again.create(certificate, scene.records.read(certificate))
    alone = collect([again], scene.ledger)  # the first draw is gone, but a certificate names it
    assert [found.kind for found in findings(alone, {}, at(DATE))] == []
    says = f"a certificate names draw {draw.digest()}, the record is {second.digest()}"
    assert findings(alone, scene.named("ada"), at(DATE)) == [Finding("redrawn", DATE, says)]


def test_records_that_do_not_check_out_are_told_and_count_for_nothing(scene: Scene, tmp_path: Path) -> None:
    draw, damaged = scene.draw(), LocalStore(tmp_path / "damaged")
    scene.certify("ada", draw.steps[0], draw=draw.reference(), beacon=draw.beacon)
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


def audits(steps: int, *heads: tuple[int, int]) -> Proven:
    """What is proven by k audits of those drawn by each head n, all of them different steps."""
    return Proven(sum(k for _, k in heads), 0, 0, steps, heads)


def exactly(steps: int, heads: tuple[tuple[int, int], ...], bad: int) -> Fraction:
    """The bound of coverage.py, without rounding."""
    return 1 - prod((1 - Fraction(k, n)) ** max(0, bad - (steps - n)) for n, k in heads)


def test_what_so_many_audits_prove() -> None:
    assert audits(100, (100, 0)).detection(5) == 0 and audits(100).detection(5) == 0
    assert audits(100, (100, 100)).detection(1) == 1 and audits(2, (2, 1)).detection(2) == 0.75
    assert audits(100).smallest is None and audits(100, (100, 100)).smallest == 1
    assert (audits(2, (2, 1)).smallest, audits(12, (12, 2)).smallest) == (2, 11)  # more than were left out: for certain
    assert audits(20, (20, 19)).smallest == 1  # 95 % and no more
    for heads in (
        ((40, 4),),
        ((40, 39),),
        ((1000, 10),),
        ((1000, 100), (999, 30), (400, 100)),
        ((80957, 100),),
        ((80957, 5000), (80000, 300)),
    ):
        found = audits(heads[0][0], *heads)
        bad = found.smallest
        assert bad and exactly(found.steps, heads, bad) >= Fraction(19, 20)
        assert bad == 1 or exactly(found.steps, heads, bad - 1) < Fraction(19, 20)
        assert abs(found.detection(bad) - exactly(found.steps, heads, bad)) < 1e-9


def test_what_is_claimed_is_never_more_than_the_exact_chance_wherever_the_bad_steps_lie() -> None:
    """Draws are without return; every set of two bad steps among six, three draws by two heads, all counted."""
    heads = ((6, 2), (6, 1), (4, 2))
    claimed = Proven(5, 0, 0, 6, heads)
    for size in (1, 2, 3):
        chances = []
        for bad in combinations(range(6), size):
            missed = [Fraction(comb(n - sum(step < n for step in bad), k), comb(n, k)) for n, k in heads]
            chances.append(1 - prod(missed))
        assert claimed.detection(size) <= min(chances) + Fraction(1, 10**12)
        assert min(chances) == chances[-1]  # the last steps are those that fewest draws can meet
    assert audits(100, (100, 10)).detection(5) <= 1 - comb(95, 10) / comb(100, 10)


def test_draws_by_early_heads_prove_nothing_of_later_steps(scene: Scene) -> None:
    """A trainer that goes on stating an old head, before the steps that it forged, is not helped by it."""
    first = scene.draw("2026-11-28", 12)
    scene.go_on(40)
    for step in first.steps:
        scene.certify("ada", step)
    found = proven(scene.rows("ada"), 40)
    assert (found.audited, found.heads) == (12, ((12, 12),))
    assert [found.detection(bad) for bad in (1, 28, 29)] == [0, 0, 1] and found.smallest == 29
    for step in scene.draw(DATE, 12).steps:
        scene.certify("ada", step)
    both = proven(scene.rows("ada"), 40)
    assert both.heads == ((12, 12), (40, 12)) and abs(both.detection(1) - 12 / 40) < 1e-12


def test_only_drawn_steps_that_were_answered_prove_anything_of_the_others() -> None:
    def row(step: int, state: str) -> DrawnStep:
        return DrawnStep(DATE, "0" * 64, step, 40, "trainer's word", state, (), (), (), (), 0)

    rows = [row(number, state) for number, state in enumerate(states.STATES)] + [row(4, "confirmed")]
    assert proven(rows, 40) == Proven(2, 4, 2, 40, ((40, 2),))
    rows += [replace(rows[3], basis="witnessed by zoe")]
    assert proven(rows, 40) == Proven(2, 4, 1, 40, ((40, 2),))


def test_many_keys_spread_over_the_steps() -> None:
    people = [Key(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))) for number in range(2000)]
    taken = [first_for(key, "0" * 64, range(10)) for key in people]
    assert set(taken) == set(range(10)) and all(140 < taken.count(step) < 260 for step in range(10))
    assert taken[:50] == [first_for(key, "0" * 64, range(10)) for key in people[:50]]
    assert taken[:50] != [first_for(key, "1" * 64, range(10)) for key in people[:50]]
    assert first_for(people[0], "0" * 64, [5]) == 5
    assert timedelta(days=7) == states.DEADLINE


def test_what_a_key_takes_follows_from_nothing_that_others_know() -> None:
    """Whoever opens a step knows the draw, the beacon and every public key."""
    private = Ed25519PrivateKey.from_private_bytes(bytes(31) + b"\1")
    owner, stranger = Key(private), Key(Ed25519PrivateKey.from_private_bytes(bytes(31) + b"\2"))
    stranger.public = owner.public
    taken, guessed = ([first_for(key, f"step {step}", range(16)) for step in range(200)] for key in (owner, stranger))
    assert sum(one == other for one, other in zip(taken, guessed, strict=True)) < 40  # by chance 12.5
