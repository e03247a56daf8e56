"""The commands of openings and pieces, of a real model: what they print, record and exit with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from storage import engine
from storage.audit import again, confirm
from storage.audit.draw import draw_key
from storage.audit.opened import opening_key
from storage.audit.opening import load_opening
from storage.errors import VerbatimError
from storage.publish import publish
from storage.store import LocalStore
from tests.storage import small
from tests.storage.conftest import Small, flip
from tests.storage.opened import STEP, UNITS, drawn

DATE = "2026-11-29"
OF = ("--step", STEP, "--draw", DATE)


class Desk(Small):
    """A volunteer's: the commands, with the run, a folder of records and one of keys filled in."""

    @property
    def records(self) -> LocalStore:
        return LocalStore(self.folder / "audits")

    def type(self, command: str, *more: object) -> tuple[int, str]:
        """(exit code, what it says) of one command."""
        own = ["--records", str(self.records.root)] if command != "verify" else []
        own += ["--keys", str(self.folder / "volunteer")] if command in ("audit", "next") else []
        done = CliRunner().invoke(app, [command, str(self.published.root), *own, *map(str, more)])
        if isinstance(done.exception, VerbatimError):  # as main() does
            return done.exception.exit_code, f"{done.output}error: {done.exception}"
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    def json(self, command: str, *more: object, expect: int = 0) -> Any:
        code, said = self.type(command, *more, "--json")
        assert code == expect, said
        return json.loads(said)


@pytest.fixture(scope="module", autouse=True)
def _self_test_once() -> Iterator[None]:
    """The vectors, and a fresh process for a no-match, have tests of their own and take longer than all of this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "self_test", lambda backend, report: None)
        patch.setattr(confirm, "repeat", again.found)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """Eight steps of a real model, two units each, published, all of them drawn."""
    made = Small(tmp_path_factory.mktemp("commands"))
    small.begin(made.folder, made.store, made.mix)
    made.train(8)
    publish(made.store, made.mix, made.published, made.key)
    drawn(made)
    return made


@pytest.fixture(scope="module")
def opened(trained: Small, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """The same, step 6 opened by the command."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    shutil.copytree(trained.folder, folder)
    desk = Desk(folder)
    code, said = desk.type("open", *OF)
    assert code == 0 and f"step {STEP} is open: {UNITS} units, {UNITS * 12} fingerprints: " in said, said
    where = f"{desk.published.root} --step 6 --draw {DATE} --records {desk.records.root}"
    assert f"next: verbatim audit {where} --unit 1, or --sum, or --update" in said
    return desk


@pytest.fixture
def desk(opened: Desk, tmp_path: Path) -> Desk:
    """A copy of it that a test may change."""
    shutil.copytree(opened.folder, tmp_path / "desk")
    return Desk(tmp_path / "desk")


def test_open_again_says_the_same(desk: Desk) -> None:
    before = {key: desk.opened.read(key) for key in desk.opened.list()}
    facts = desk.json("open", *OF)
    opening = load_opening(desk.release(), STEP).opening
    assert facts == {
        "step": STEP,
        "draw": DATE,
        "units": UNITS,
        "tensor": opening.tensor,
        "opening": f"{desk.opened.uri}/{opening_key(STEP)}",
        "fingerprints": UNITS * 12,
    }
    assert {key: desk.opened.read(key) for key in desk.opened.list()} == before


@pytest.mark.parametrize("part", [("--unit", 0), ("--unit", 1), ("--sum",), ("--update",)])
def test_a_part_matches_and_its_certificate_is_genuine(desk: Desk, part: tuple[object, ...]) -> None:
    piece = " ".join(str(word).removeprefix("--") for word in ("step 6", *part))
    found = desk.json("audit", *OF, *part)
    assert (found["verdict"], found["exit_code"], found["piece"], found["step"]) == ("match", 0, piece, STEP)
    code, said = desk.type("audit", *OF, *part)
    assert code == 0 and f"MATCH {piece} (" in said and f"certificate: {desk.records.root}/certificates/step-6-" in said
    code, said = desk.type("verify", found["certificate"])
    assert code == 0 and f"{piece} match, by key " in said
    code, said = desk.type("verify", found["certificate"], "--replay")
    assert code == 0, said


def test_coverage_and_next_know_the_parts(desk: Desk) -> None:
    certificate = desk.json("audit", *OF, "--unit", 0)["certificate"]
    named = desk.folder / "named.txt"
    auditor = json.loads(Path(certificate).read_bytes())["body"]["auditor"]
    named.write_text(f"{auditor} Ada\n", encoding="utf-8")
    code, said = desk.type("coverage", "--named", named)
    (row,) = [line for line in said.splitlines() if line.startswith(f"{DATE}       6")]
    assert "unit 0" in row and code in (0, 11), said  # 11: today is long after the made-up night
    assert desk.json("next")["unit"] in (None, 1)  # of step 6 unit 0 is done, others are not open


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--unit", 2), 13, "its 2 units are 0 to 1"),
        (("--unit", 0, "--sum"), 2, "next: verbatim audit "),
        (("--sum", "--update"), 2, "one at a time"),
    ],
)
def test_what_is_no_part_is_refused(desk: Desk, options: tuple[object, ...], code: int, said: str) -> None:
    found, text = desk.type("audit", *OF, *options)
    assert found == code and said in text, text
    assert not desk.records.list("certificates/")


def test_a_part_needs_its_draw_and_its_opening(desk: Desk) -> None:
    code, said = desk.type("audit", "--step", STEP, "--sum")
    assert code == 2 and f"next: verbatim audit {desk.published.root} --step 6 --sum --draw DATE" in said, said
    code, said = desk.type("audit", "--step", 5, "--draw", DATE, "--sum")
    assert code == 13 and "REFUSED step 5 sum" in said and "next: verbatim open STORE --step 5 --draw DATE" in said
    for command in ("open", "audit"):
        code, said = desk.type(command, "--step", STEP, "--draw", "2026-11-28", *["--sum"] * (command == "audit"))
        assert code == 13 and "no draw of 2026-11-28 is recorded in" in said and "next: verbatim coverage STORE" in said
        code, said = desk.type(command, "--step", STEP, "--draw", "29.11.2026", *["--sum"] * (command == "audit"))
        assert code == 2 and "write it as 2026-11-29" in said
    code, said = desk.type("open", "--step", 8, "--draw", DATE)
    assert code == 13 and "records steps 0 to 7" in said


def test_a_stranger_finds_the_draw_in_the_release(desk: Desk) -> None:
    """Whoever audits has no records but what was published, listed or later."""
    key = draw_key(desk.release().ledger.run_id, DATE)
    data = desk.records.read(key)
    shutil.rmtree(desk.records.root)
    assert desk.type("audit", *OF, "--sum")[0] == 13
    desk.published.create(f"audits/{key}", data)
    assert desk.type("audit", *OF, "--sum")[0] == desk.type("audit", *OF)[0] == 0
    head = json.loads(data)["statement"]["body"]["head"].encode()
    desk.published.path(f"audits/{key}").write_bytes(data.replace(head, b"0" * 64))
    code, said = desk.type("audit", *OF, "--sum")
    assert code == 11 and f"the statement of {DATE} is not signed by the run's trainer" in said, said


def test_a_lie_in_an_opening_is_no_match_and_says_what_to_do(desk: Desk) -> None:
    path = desk.opened.path(opening_key(STEP))
    opening = json.loads(path.read_bytes())
    opening["nll"][0] += 1 << 12
    path.write_bytes(json.dumps(opening, separators=(",", ":"), sort_keys=True).encode())
    code, said = desk.type("audit", *OF, "--unit", 0)
    assert code == 10 and "NO-MATCH step 6 unit 0" in said and "an audit of the whole step says which" in said, said
    found = desk.json("audit", *OF, "--sum", expect=10)
    assert found["fields"] == ["loss"] and found["certificate"]
    assert desk.type("audit", *OF, "--update")[0] == desk.type("audit", *OF)[0] == 0


def test_a_damaged_opening_is_an_input_fault_unless_a_mirror_has_it(desk: Desk) -> None:
    second = desk.folder / "second"
    shutil.copytree(desk.published.root, second)
    flip(desk.opened.path(opening_key(STEP)), 30)
    code, said = desk.type("audit", *OF, "--update")
    assert code == 11 and "INPUT-FAULT step 6 update" in said and "certificate" not in said, said
    code, said = desk.type("audit", *OF, "--update", "--mirror", second)
    assert code == 0 and f"bad copy: {desk.opened.uri}: {opening_key(STEP)}: " in said, said
