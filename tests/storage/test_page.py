"""The report page: whole in one file, the same bytes from the same input, nothing of a record taken for markup."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flows.cli import app
from storage import checkpoint
from storage.audit.certificate import sign
from storage.audit.collect import collect
from storage.audit.dispute import save_dispute
from storage.audit.standing import Standing, standing
from storage.classes import CLASSES, class_of
from storage.errors import InputFault, UsageError
from storage.figures import diagnostics_key
from storage.page.history import history
from storage.page.make import PAGE_KEY, page
from storage.page.markup import LISTED, Place
from storage.page.report import write_report
from storage.page.shelf import MEANING
from storage.page.steps import DRAWN, MARKS, MAX_LINES, NUMBER
from storage.provenance import code_files
from storage.publish import publish
from storage.release import RELEASE_KEY
from storage.store import LocalStore
from tests.storage.conftest import Small
from tests.storage.drawn import BEACON, Book, at, disputed

VOID = {"meta", "link", "input", "line", "circle", "polyline", "polygon", "path"}
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)></script>\u202e"


class Read(HTMLParser):
    """Links, tags, attributes and text; what opens must close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        self.links += [value or "" for name, value in attributes if name == "href" and tag == "a"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data

    @property
    def objects(self) -> set[str]:
        """Where links lead to, but those within the page."""
        return {link for link in self.links if not link.startswith("#")}


def html_of(made: Small) -> str:
    return made.published.read(PAGE_KEY).decode()


def report_of(book: Book, named: dict[str, str] | None = None, date: str = "2026-12-15") -> str:
    return page(history(book.published, book.ledger), Place({}, None), standing_of(book, named, date)).decode()


def standing_of(book: Book, named: dict[str, str] | None, date: str = "2026-12-15") -> Standing:
    evidence = collect([book.published, book.records], book.ledger)
    return standing(book.published, book.ledger, evidence, named or {}, at(date))


def bits_of(html: str) -> list[int]:
    runs = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])["runs"]  # type: ignore[index]
    return [value for length, value in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


def shown(html: str) -> list[str]:
    """The name of each step's mark."""
    return [MARKS[(bits & (DRAWN - 1)).bit_length() - 1].name for bits in bits_of(html)]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    yield Book(tmp_path)


def test_every_object_of_the_release_is_linked_and_nothing_else(made: Small) -> None:
    assert Read(html_of(made)).objects == set(made.published.list())


def test_it_stands_alone(made: Small) -> None:
    html = html_of(made)
    found = Read(html)
    assert not set(found.tags) & {"img", "iframe", "object", "embed", "base"}
    assert not [name for name in found.names if name.startswith("on")] and not {"src", "style", "action"} & found.names
    assert not re.search(r"https?:|@import|url\(|fetch|XMLHttp|innerHTML|eval\(", html)
    assert html.count("<h1>") == 1 and 'lang="en"' in html and "width=device-width" in html


def test_its_policy_forbids_all_but_its_own_script_and_style(made: Small) -> None:
    html = html_of(made)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy and policy[1].startswith("default-src 'none';")
    for tag in ("style", "script"):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert len(inner) == 1 and f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert html.index("Content-Security-Policy") < html.index("<style>")


def test_what_it_is_made_of_belongs_to_the_code() -> None:
    assert {f"storage/page/page.{kind}" for kind in ("html", "css", "js")} <= code_files().keys()


def test_it_says_what_the_run_is(made: Small) -> None:
    found, ledger = Read(html_of(made)), made.run().ledger
    for name in (ledger.run_id, ledger.head, ledger.trajectory_root(), ledger.header.mix_root, ledger.header.trainer):
        assert name in found.text
    assert "trained for 12 of 12 steps" in found.text and "as declared when the run began" in found.text
    assert "counts no audits, not even those whose records came with it" in found.text and "name: small" in found.text
    assert set(MEANING) == set(CLASSES)


def test_the_commands_that_it_tells_are_those_of_the_command_line(made: Small) -> None:
    text = re.search(r'id="check">.*?<pre>(.*?)</pre>', html_of(made), re.S)
    assert text
    lines = [shlex.split(line, comments=True) for line in text[1].replace("&#x27;", "'").splitlines()]
    ours = [line[1:] for line in lines if line[0] == ".venv/bin/verbatim"]
    assert ours[:3] == [["verify", "ADDRESS"], ["audit", "ADDRESS", "--initial"], ["audit", "ADDRESS", "--step", "11"]]
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {line[0] for line in ours} <= commands and ours[3][0] == "coverage"
    archive = next(line[2] for line in lines if line[0] == "tar")
    assert class_of(archive) == "code" and archive in made.published.list()


def test_the_same_bytes_wherever_it_is_published(made: Small) -> None:
    other = LocalStore(made.folder / "elsewhere")
    publish(made.store, made.mix, other, made.key)
    assert other.read(PAGE_KEY) == made.published.read(PAGE_KEY)


def test_the_same_bytes_from_the_same_records_at_the_same_time(book: Book) -> None:
    book.draw()
    book.certify("anna", 3)
    named = book.named("anna")
    assert report_of(book, named) == report_of(book, named) != report_of(book, named, "2026-12-16")


def test_nothing_of_a_record_is_taken_for_markup(made: Small) -> None:
    found = history(made.store, made.run().ledger)
    spec = found.spec.model_construct(**(dict(found.spec) | {"name": HOSTILE}))
    segment = replace(found.segments[0], end=found.segments[0].end.model_copy(update={"reason": HOSTILE}))  # type: ignore[union-attr]
    hostile = replace(found, spec=spec, recipe=HOSTILE, segments=[segment])
    ours = page(found, Place({}), None).decode()
    html = page(hostile, Place({"segments/<b>\"'.json": 1, "recipe.yaml": 2}), None).decode()
    read = Read(html)
    assert read.tags.count("script") == 2 and "img" not in read.tags and "b" not in read.tags
    assert read.text.count("<script>alert(1)</script>") == 4 and "\u202e" not in html  # title, heading, reason, recipe
    assert [tag for tag in read.tags if tag != "a"].count("code") == [tag for tag in Read(ours).tags].count("code")


def test_neither_is_a_name_that_a_reader_gave_a_key(book: Book) -> None:
    draw = book.draw()
    book.certify("anna", draw.steps[0], draw=draw.reference())
    html = report_of(book, {book.key("anna").public: HOSTILE})
    read = Read(html)
    assert "img" not in read.tags and read.tags.count("script") == 2 and "\u202e" not in html
    notes = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])["notes"]  # type: ignore[index]
    assert HOSTILE in notes[str(draw.steps[0])][1]  # shown as text alone


def test_a_link_is_never_more_than_a_path(book: Book) -> None:
    key = "segments/a.json"
    place = Place({key: 1}, "javascript%3Aalert(1)/")
    assert Read(page(history(book.published, book.ledger), place).decode()).objects == {f"{place.base}{key}"}


def test_of_many_objects_the_first_and_the_last_are_linked(made: Small) -> None:
    sizes: dict[str, int | None] = {f"digests/{step:08d}.json": 10 for step in range(80_957)}
    html = page(history(made.store, made.run().ledger), Place(sizes)).decode()
    links = [link for link in Read(html).links if link.startswith("digests/")]
    assert len(links) == LISTED and links[0] == "digests/00000000.json" and links[-1] == "digests/00080956.json"
    assert f"{80_957 - LISTED:,} more, listed in {RELEASE_KEY}" in html and ">80,957<" in html and ">809,570<" in html


def test_the_map_of_a_published_run(made: Small) -> None:
    html = html_of(made)
    names = shown(html)
    assert len(names) == 12 and [step for step, name in enumerate(names) if name == "checkpoint"] == [0, 5, 10]
    assert set(names) == {"checkpoint", "recorded"} and not any(bits & DRAWN for bits in bits_of(html))


def test_the_map_of_audits(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "check_there", lambda *given: None)  # a made-up state proves nothing
    first = book.draw("2026-11-29", 4)
    one, two, three, four = first.steps
    reference = {"draw": first.reference()}
    book.certify("anna", one, **reference)
    book.certify("babak", one, "nvidia", **reference)
    book.certify("anna", two, **reference)
    book.certify("mallory", three, **reference)
    book.published.create(f"checkpoints/{four:08d}.json", b"{}")
    book.published.create(f"opened/openings/{four:08d}.json", b"{}")
    html = report_of(book, book.named("anna", "babak"))
    names = shown(html)
    assert (names[one], names[two], names[three], names[four]) == ("confirmed", "attested", "unanswered", "overdue")
    assert [step for step, bits in enumerate(bits_of(html)) if bits & DRAWN] == first.steps
    assert bits_of(html)[three] & 1 << NUMBER["unlisted"] and bits_of(html)[four] & 1 << NUMBER["opened"]
    assert names.count("recorded") == 8


def test_a_mismatch_comes_before_everything(book: Book) -> None:
    draw = book.draw()
    step = draw.steps[0]
    wrong = book.ledger[step].model_copy(update={"loss": "40000000"})
    book.certify("anna", step, verdict="no-match", reproduced=wrong, draw=draw.reference())
    html = report_of(book, book.named("anna"))
    assert shown(html)[step] == "disputed" and 'class="result bad"' in html
    assert f"<strong>no match</strong> at step {step}." in html
    assert "<bdi>anna</bdi> (no match)" in html


def test_two_draws_of_one_night_are_both_shown_and_count_against_the_run(book: Book, tmp_path: Path) -> None:
    """A file's value was exchanged: each row says by which of the two its step was drawn."""
    values = [BEACON.model_copy(update={"value": sign * 64}) for sign in "ab"]
    stores = [book.records, LocalStore(tmp_path / "other")]
    drawn = [book.draw(count=3, beacon=value, records=store) for value, store in zip(values, stores, strict=True)]
    found = standing(book.published, book.ledger, collect(stores, book.ledger), {}, at("2026-12-15"))
    assert [finding.kind for finding in found.against] == ["redrawn"]
    html = page(history(book.published, book.ledger), Place({}, None), found).decode()
    for draw, value in zip(drawn, values, strict=True):
        assert html.count(f"file, round 7, {value.value[:16]}…: one of 2 draws of this night") == len(draw.steps) == 3
    assert 'class="result bad"' in html and "one of 2 draws" not in report_of(book)


def test_a_dispute_is_told_whoever_made_it(book: Book) -> None:
    wrong = book.ledger[5].model_copy(update={"loss": "40000000"})
    body = book.certify("anna", 5, verdict="no-match", reproduced=wrong)
    key = save_dispute(book.records, disputed(sign(body, book.key("anna")), book.key("anna")))
    for named, who in ((book.named("anna"), "anna"), ({}, f"unlisted key {body.auditor[:16]}")):
        html = report_of(book, named)
        assert f"Dispute of step 5, by <bdi>{who}</bdi>, which anyone can judge" in html
        assert f"{book.records.uri}: {key}." in html
        assert shown(html)[5] == ("disputed" if named else "unlisted")


def test_strangers_certificates_do_not_fill_the_page(book: Book) -> None:
    for _ in range(MAX_LINES + 3):
        book.certify("mallory", 5)
    book.certify("anna", 5)
    html = report_of(book, book.named("anna"))
    lines = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])["notes"]["5"]  # type: ignore[index]
    assert lines[0] == "match of step 5 by anna on cpu" and lines[-1] == "and 4 more" and len(lines) == MAX_LINES + 1


def test_the_result_is_the_first_sentence(book: Book) -> None:
    assert "to this page nothing is proven of it: it counts nobody's keys." in report_of(book)
    draw = book.draw("2026-11-29", 1)
    assert "no drawn step was audited by a key that it counts. 1 drawn step went unanswered." in report_of(
        book, book.named("anna")
    )
    book.certify("anna", draw.steps[0], draw=draw.reference())
    html = report_of(book, book.named("anna"))
    assert "1 drawn step of 12 came out equal" in html and "had 12 steps or more been false" in html
    assert "1 of them was drawn on the trainer's word alone." in html and 'class="result open"' in html


def test_figures_that_are_none_are_refused(made: Small) -> None:
    found = history(made.store, made.run().ledger)
    assert found.diagnosed.steps == [0, 4, 8] and found.diagnosed.names == ["head"]
    path = made.store.path(diagnostics_key(4))
    path.write_bytes(b'{"kind":"diagnostics","step":4,"tensors":{"head":{"weight_norm":"<b>"}}}')
    with pytest.raises(InputFault, match=r"diagnostics/00000004.json: weight_norm is '<b>'"):
        history(made.store, made.run().ledger)


def test_a_report_links_from_where_it_lies(made: Small, tmp_path: Path) -> None:
    run, file = made.release(), tmp_path / "reports" / "report.html"
    file.parent.mkdir()
    evidence = collect([made.published], run.ledger)
    write_report(
        file, made.published, run.ledger, standing(made.published, run.ledger, evidence, {}, datetime.now(UTC))
    )
    links = Read(file.read_text(encoding="utf-8")).objects
    assert {(file.parent / link).resolve() for link in links} == {made.published.path(k) for k in made.published.list()}


def test_a_report_replaces_a_page_and_nothing_else(book: Book, tmp_path: Path) -> None:
    file, found = tmp_path / "report.html", standing_of(book, None)
    write_report(file, book.published, book.ledger, found)
    write_report(file, book.published, book.ledger, found)
    file.write_text("my notes", encoding="utf-8")
    with pytest.raises(UsageError, match="holds no page; nothing was written"):
        write_report(file, book.published, book.ledger, found)
    assert file.read_text(encoding="utf-8") == "my notes"


@pytest.mark.parametrize("name", [PAGE_KEY, "report.html", "audits/report.html"])
def test_a_report_never_lies_in_the_run(made: Small, tmp_path: Path, name: str) -> None:
    run, before = made.release(), {key: made.published.read(key) for key in made.published.list()}
    found = standing(made.published, run.ledger, collect([made.published], run.ledger), {}, datetime.now(UTC))
    (tmp_path / "link").symlink_to(made.published.root)
    for folder in (made.published.root, tmp_path / "link"):
        with pytest.raises(UsageError, match="lies in the run that it is about"):
            write_report(folder / name, made.published, run.ledger, found)
    assert {key: made.published.read(key) for key in made.published.list()} == before
