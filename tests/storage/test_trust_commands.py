"""The commands of sampling and trust, on a made-up run: what they print, record and exit with."""

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.checks import records as verify
from flows.cli import app
from storage.audit.certificate import Beacon, sign
from storage.audit.draw import draw_key, load_draw
from storage.audit.keys import load_or_create_key
from storage.audit.opening import Opening
from storage.audit.statement import Statement, admit_missed, announce, statement_key
from storage.audit.witness import Witness, bear_witness, witness_key
from storage.errors import CertificateFault, Equivocation, InputFault, Refused, UsageError
from storage.ledger import HEADER_KEY
from storage.store import LocalStore
from tests.storage.drawn import BEACON, Book, at, disputed, hourly, resigned


class Desk(Book):
    """The commands with run, records and keys filled in."""

    said = ""

    def run(self, command: str, *more: object, expect: int = 0, who: str = "trainer", **records: Path) -> Any:
        """The JSON that a command prints, and what it says without --json in `said`. who: whose folder of keys."""
        own = [] if command == "coverage" else ["--keys", str(self.keys_of(who))]
        place = records.get("records", self.records.root)
        arguments = [command, str(self.published.root), *own, "--records", str(place), *map(str, more)]
        done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert done.exit_code == expect, done.output
        text = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert text.exit_code == expect
        self.said = text.output
        return json.loads(done.output)

    def keys_of(self, who: str) -> Path:
        """A person's own folder of keys, with an auditor's; the trainer's with the trainer's key."""
        folder = self.folder / "keys" / who
        folder.mkdir(parents=True, exist_ok=True)
        source = "trainer-of-a-run" if who == "trainer" else who
        self.key(source)
        for name in ("trainer",) if who == "trainer" else ("auditor",):
            if not (folder / f"{name}.key").exists():
                (folder / f"{name}.key").hardlink_to(self.folder / "people" / f"{source}.key")
        return folder

    def file_of(self, *names: str) -> Path:
        """The reader's file of named keys."""
        path = self.folder / "named.txt"
        path.write_text("".join(f"{key} {name}\n" for key, name in self.named(*names).items()), encoding="utf-8")
        return path

    @property
    def beacon(self) -> Path:
        """A file with a value."""
        path = self.folder / "beacon.json"
        path.write_bytes(BEACON.canonical())
        return path


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def test_sample_by_a_file_draws_at_once_and_only_once(desk: Desk) -> None:
    first = desk.run("sample", "--beacon", desk.beacon, "--count", 3)
    assert len(first["steps"]) == 3 and (first["scheme"], first["round"], first["due"]) == ("file", 7, None)
    assert desk.run("sample", "--beacon", desk.beacon, "--count", 1) == first
    store = shlex.quote(str(desk.published.root))
    assert f"verbatim audit {store} --draw {first['date']} --step {first['steps'][0]}" in desk.said
    assert load_draw(desk.records, desk.ledger, first["date"]).steps == first["steps"]


def test_sample_by_drand_states_a_round_to_come_that_another_witnesses(desk: Desk) -> None:
    stated = desk.run("sample", "--beacon", "http://nobody.invalid")
    assert stated["scheme"] == "quicknet" and stated["steps"] == [] and stated["due"] > datetime.now(UTC).isoformat()
    assert desk.run("sample", "--beacon", "http://nobody.invalid") == stated
    assert f"verbatim witness {shlex.quote(str(desk.published.root))}" in desk.said
    (own,) = desk.run("witness", who="zoe")
    assert own["exit_code"] == 0 and "witnessed: statements/" in desk.said
    assert len(desk.records.list("witnesses/")) == 1
    found = desk.run("coverage")
    assert (found["findings"], found["drawn"], found["waiting"]) == ([], [], [today()])


def test_coverage_writes_its_page(desk: Desk, tmp_path: Path) -> None:
    drawn = desk.run("sample", "--beacon", desk.beacon, "--count", 2)["steps"]
    desk.certify("anna", drawn[0])
    page = tmp_path / "report.html"
    found = desk.run("coverage", "--named", desk.file_of("anna"), "--page", page)
    html = page.read_text(encoding="utf-8")
    assert found["page"] == str(page) and f"page: {page}" in desk.said
    assert "1 drawn step of 12 came out equal" in html and desk.ledger.head in html
    assert desk.run("coverage")["page"] is None


def test_a_witness_of_a_file_s_statement_is_told_what_it_is_worth(desk: Desk) -> None:
    desk.run("sample", "--beacon", desk.beacon)
    desk.run("witness", who="zoe")
    assert "its round has no time" in desk.said and "is to come" not in desk.said


def test_witness_with_nothing_to_come(desk: Desk) -> None:
    assert desk.run("witness", who="zoe") == [] and "nothing to witness" in desk.said


def test_a_witness_that_finds_a_contradiction_exits_with_it(desk: Desk, tmp_path: Path) -> None:
    desk.run("sample", "--beacon", "http://nobody.invalid")
    desk.run("witness", who="zoe")
    other, place = LocalStore(tmp_path / "later"), statement_key(desk.ledger.run_id, today())
    first = Statement.parse(desk.records.read(place), "statement")
    other.create(place, resigned(first, desk.trainer, round=first.body.round + 1).canonical())
    (row,) = desk.run("witness", "--statements", other.root, who="zoe", expect=11)
    assert f"two statements of {today()}" in row["says"] and "not witnessed: " in desk.said


def test_sample_exits_with_what_counts_against_the_run(desk: Desk) -> None:
    desk.state("2026-11-20")
    other = desk.folder / "other.json"
    other.write_bytes(BEACON.model_copy(update={"round": 8}).canonical())
    done = desk.run("sample", "--beacon", other, expect=11)
    assert len(done["steps"]) == 1 and list(done["undrawn"]) == ["2026-11-20"]
    assert "2026-11-20: not drawn, which counts against the run:" in desk.said


def test_only_the_trainer_samples(desk: Desk) -> None:
    """A stranger is refused, and given no key; nor is another run's trainer let in."""
    keys = desk.folder / "a-stranger-s"
    given = ["sample", str(desk.published.root), "--beacon", str(desk.beacon), "--keys", str(keys)]
    given += ["--records", str(desk.records.root)]
    with pytest.raises(Refused, match=r"there is no key .*/a-stranger-s/trainer.key"):
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert not keys.exists() and not desk.records.root.exists()
    load_or_create_key(keys, "trainer")
    with pytest.raises(Refused, match="is not the run's trainer"):
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert not desk.records.root.exists()


def test_coverage_counts_the_keys_that_a_reader_names(desk: Desk) -> None:
    desk.draw(today(), 12)
    desk.certify("ada", 6, first=5)
    desk.certify("ben", 6, "nvidia", first=5)
    unnamed = desk.run("coverage")
    assert unnamed["states"] == {"due": 12} and (unnamed["certificates"], unnamed["unlisted"]) == (2, 2)
    assert unnamed["proven"]["smallest"] is None and "nothing is proven of the others" in desk.said
    both = desk.run("coverage", "--named", desk.file_of("ada", "ben"))
    assert both["states"] == {"due": 10, "confirmed": 2} and both["levels"][4:8] == ["", "confirmed", "confirmed", ""]
    assert (both["proven"]["audited"], both["proven"]["smallest"], both["proven"]["chances"]["1"]) == (2, 11, 1 / 6)
    one = desk.run("coverage", "--named", desk.file_of("ada"))
    assert one["states"] == {"due": 10, "attested": 2} and one["unlisted"] == 1
    assert "attested    ada, 1 unlisted" in desk.said


def test_records_in_the_release_count_without_being_named(desk: Desk) -> None:
    desk.draw(today())
    for key in desk.records.list():
        desk.published.create("audits/" + key, desk.records.read(key))
    assert len(desk.run("coverage", records=desk.folder / "empty")["drawn"]) == 2
    assert f"2 records in {desk.published.uri}\n0 records in {(desk.folder / 'empty').as_uri()}" in desk.said


def test_coverage_says_what_counts_against_the_run(desk: Desk) -> None:
    desk.draw("2026-11-20")
    desk.records.path(draw_key(desk.ledger.run_id, "2026-11-20")).unlink()
    found = desk.run("coverage", expect=11)
    assert found["findings"][0]["kind"] == "dropped"
    assert "against the run: 2026-11-20: dropped: round 7 of file is out" in desk.said


def test_coverage_of_a_disputed_step(desk: Desk) -> None:
    entry = desk.ledger[6].model_copy(update={"loss": "40000000"})
    desk.certify("ada", 6, verdict="no-match", reproduced=entry)
    assert desk.run("coverage")["levels"].count("disputed") == 0
    found = desk.run("coverage", "--named", desk.file_of("ada"), expect=10)
    assert found["levels"][6] == "disputed"
    (step,) = desk.draw(today(), 1).steps
    desk.certify("ada", step, verdict="no-match", reproduced=desk.ledger[step].model_copy(update={"loss": "40000000"}))
    (row,) = desk.run("coverage", "--named", desk.file_of("ada"), expect=10)["drawn"]
    assert (row["state"], row["against"]) == ("disputed", ["ada"]) and "  ada (no match)  " in desk.said


def test_next_names_a_step_for_this_key_until_nothing_is_left(desk: Desk) -> None:
    steps, taken = desk.draw(today(), 3).steps, []
    for left in (3, 2, 1):
        found = desk.run("next", who="ada")
        assert (found["of"], found["date"], found["state"]) == (left, today(), "due")
        assert f"--draw {today()} --step {found['step']}" in desk.said
        taken.append(found["step"])
        desk.certify("ada", found["step"])
    assert sorted(taken) == steps
    assert desk.run("next", who="ada")["step"] is None and "nothing is left" in desk.said
    other = desk.run("next", who="ben")
    assert other["step"] in steps and other["of"] == 3


def test_next_sends_a_key_first_where_nobody_was(desk: Desk) -> None:
    steps = desk.draw(today(), 3).steps
    for step in steps[:2]:
        desk.certify("ada", step)
    assert [desk.run("next", who=name)["step"] for name in ("ben", "cy", "di")] == [steps[2]] * 3


def test_next_names_a_unit_of_an_opened_step(desk: Desk) -> None:
    (step,) = desk.draw(today(), 1).steps
    assert desk.run("next", who="ada")["unit"] is None and "--unit" not in desk.said
    desk.published.create(f"opened/openings/{step:08d}.json", b"{}")
    units = {desk.run("next", who=f"auditor-{number}")["unit"] for number in range(24)}  # all alike once in 2^23
    assert units == {0, 1} and f"--step {step} --unit " in desk.said  # the step has two windows, one in each unit


def test_a_stranger_s_certificate_of_a_unit_keeps_nobody_from_it(desk: Desk) -> None:
    draw = desk.draw(today(), 1)
    (step,) = draw.steps
    desk.published.create(f"opened/openings/{step:08d}.json", b"{}")
    one = {"recorded": "1" * 64, "reproduced": "1" * 64, "draw": draw.reference(), "beacon": draw.beacon}
    for unit in (0, 1):
        desk.certify("mallory", step, piece=f"step {step} unit {unit}", **one)
    assert desk.run("next", who="ada")["unit"] in (0, 1)
    assert desk.run("next", "--named", desk.file_of("mallory"), who="ada")["unit"] is None


def test_verify_takes_statements_and_draws_and_sets_them_beside_each_other(desk: Desk, tmp_path: Path) -> None:
    draw = desk.draw("2026-11-20")
    place = desk.records.path(statement_key(desk.ledger.run_id, "2026-11-20"))
    both = [place, desk.records.path(draw_key(desk.ledger.run_id, "2026-11-20"))]
    said = [line["says"] for line in verify([str(desk.published.root)], both)]
    assert said[0] == "statement of 2026-11-20, by the run's trainer" and said[1].startswith(
        "draw of 2026-11-20: steps "
    )
    other = tmp_path / "other.json"
    other.write_bytes(resigned(draw.statement, desk.trainer, head="0" * 64).canonical())
    with pytest.raises(Equivocation, match="after 12 steps the statement of 2026-11-20 has head"):
        verify([str(desk.published.root)], [*both, other])
    other.write_bytes(resigned(draw.statement, desk.key("an-enemy"), head="0" * 64).canonical())
    with pytest.raises(InputFault, match="not signed by the run's trainer"):
        verify([str(desk.published.root)], [*both, other])


def told(desk: Desk, *files: Path) -> list[str]:
    return [line["says"] for line in verify([str(desk.published.root)], list(files))]


def test_verify_says_what_a_witness_is_worth(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    source, kept, run = hourly(monkeypatch), desk.records, desk.ledger.run_id
    stated = announce(kept, desk.ledger, desk.trainer, "2026-11-20", 1, source, at("2026-11-20"))
    assert isinstance(stated, Statement)
    zoe = desk.key("zoe")
    bear_witness(kept, desk.ledger, zoe, stated, at("2026-11-20", "03:05:00"))
    statement = kept.path(statement_key(run, "2026-11-20"))
    seen = kept.path(witness_key(run, "2026-11-20", zoe.public))
    said = f"witness of statement {stated.digest()} of 2026-11-20, seen at 2026-11-20T03:05:00Z by key {zoe.public}; "
    assert told(desk, seen) == [said + "give its statement too, to know whether it was in time"]
    assert told(desk, seen, statement)[0] == said + "in its night, before its round"
    record = Witness.parse(seen.read_bytes(), "a witness")
    late, own = desk.folder / "late.json", desk.folder / "own.json"
    for path, key, changes in ((late, zoe, {"seen": "2026-11-20T09:00:00Z"}), (own, desk.trainer, {})):
        body = record.body.model_copy(update={"witness": key.public} | changes)
        path.write_bytes(Witness(body=body, signature=key.sign(body.canonical(), "witness")).canonical())
    assert told(desk, late, statement)[0].endswith("; not in time: it counts for nothing")
    assert told(desk, statement, own)[1].endswith("; it is the trainer's own key, so it counts for nothing")
    late.write_bytes(seen.read_bytes().replace(b"03:05:00", b"02:05:00"))
    with pytest.raises(InputFault, match="the signature is not that of the witness"):
        told(desk, late)


def test_verify_names_every_record_for_what_it_is(desk: Desk) -> None:
    desk.state("2026-11-20")
    body = desk.certify("ada", 6)
    admit_missed(desk.records, desk.ledger, desk.trainer, "2026-11-21", at("2026-11-22"))
    path = desk.folder / "given.json"

    def says(record: bytes) -> str:
        path.write_bytes(record)
        (line,) = told(desk, path)
        return line

    draw = desk.draw("2026-11-19")
    kept = {key: desk.records.read(key) for key in desk.records.list()}
    begins = {
        "statements": ("statement of ", "missed of "),
        "draws": "draw of ",
        "certificates": "step 6 match, by key ",
    }
    for key, data in kept.items():
        assert says(data).startswith(begins[key.split("/")[0]]), key
    assert says(BEACON.canonical()) == "value of round 7 of file: nobody vouches for it, or for when"
    assert says(Beacon(scheme="quicknet", round=1000, value="0" * 64).canonical()).startswith(
        "value of round 1000 of quicknet, which came out at 2023-08-23 15:59:24+00:00"
    )
    wrong = desk.ledger[6].model_copy(update={"loss": "40000000"})
    lost = body.model_copy(update={"verdict": "no-match", "reproduced": wrong})
    assert says(disputed(sign(lost, desk.key("ada")), desk.key("ada"))).startswith("dispute of step 6, by key ")
    opening = Opening(
        run=desk.ledger.run_id,
        step=6,
        draw=draw.reference(),
        beacon=draw.beacon,
        nll=[1, 1],
        lse2=[1, 1],
        fingerprints="0" * 64,
        tensor="head",
        gradient="0" * 64,
    )
    assert says(opening.canonical()).startswith("opening of step 6, for the draw of 2026-11-19; ")
    with pytest.raises(InputFault, match="it is of run 00000"):
        says(opening.model_copy(update={"run": "0" * 64}).canonical())
    with pytest.raises(InputFault, match="it is of step 12, the ledger holds 12 steps"):
        says(opening.model_copy(update={"step": 12}).canonical())
    with pytest.raises(CertificateFault, match="of kind 'header' is none of an audit"):
        says(desk.published.read(HEADER_KEY))


def test_a_beacon_that_is_neither_file_nor_server(desk: Desk) -> None:
    arguments = ["sample", str(desk.published.root), "--beacon", str(desk.folder / "none.json")]
    done = CliRunner().invoke(app, [*arguments, "--keys", str(desk.folder)])
    assert isinstance(done.exception, UsageError) and "write {" in str(done.exception)
