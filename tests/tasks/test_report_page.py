"""The nightly page: beside the records, made anew, linked from the flow's run, served to a browser."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from flows import reports, sample
from storage.audit.keys import Key
from storage.release import RELEASE_KEY
from storage.store import MemoryStore
from tasks import page, show
from tasks.audit import AuditFailed
from tests.storage.drawn import Book


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """A run with one drawn night, on a machine whose auditor is Ada."""
    made = Book(tmp_path)

    def key(folder: Path, name: str) -> Key:
        assert name == "auditor"
        return made.key("ada")

    monkeypatch.setattr(page, "load_or_create_key", key)
    return made


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The artifacts that a task made, headline and facts."""
    artifacts: list[str] = []

    def result(key: str, headline: str, facts: tuple[str, ...]) -> None:
        artifacts.append("\n".join([headline, *facts]))

    monkeypatch.setattr(show, "result", result)
    return artifacts


def made(book: Book) -> Path:
    return Path(page.report_page.fn(str(book.published.root), str(book.records.root)))


def test_the_page_lies_beside_the_records_and_is_made_anew(book: Book, shown: list[str]) -> None:
    draw = book.draw(count=2)
    file = made(book)
    assert file == book.records.root / "pages" / f"{book.ledger.run_id[:16]}.html"
    assert "nothing is proven of it: no drawn step was audited" in file.read_text(encoding="utf-8")
    for step in draw.steps:
        book.certify("ada", step, draw=draw.reference(), beacon=draw.beacon)
    assert made(book) == file
    text = file.read_text(encoding="utf-8")
    assert "2 drawn steps of 12 came out equal" in text and page.OWN in text
    assert str(file) in shown[-1] and "2 drawn: attested" in shown[-1]


def test_it_is_linked_and_served_and_nothing_beside_it(
    book: Book, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book.draw()
    with reports.served(0) as address:
        monkeypatch.setenv(show.REPORTS, address)
        file = made(book)
        link = shown[-1].split("](")[1].split(")")[0]
        assert urllib.request.urlopen(link, timeout=10).read() == file.read_bytes()
        for other in (
            file.with_name("keys.html"),
            file.with_suffix(".json"),
            book.records.root / "elsewhere" / file.name,
        ):
            other.parent.mkdir(exist_ok=True)
            other.write_bytes(file.read_bytes())
            assert refused(address, other)
        secret = book.records.root / "secret"
        secret.write_bytes(file.read_bytes())
        file.write_text("secret", encoding="utf-8")
        assert refused(address, file)
        file.unlink()
        file.symlink_to(secret)
        assert refused(address, file)
    assert RELEASE_KEY not in book.published.list()


def refused(address: str, file: Path) -> bool:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"{address}{file}", timeout=10)
    return error.value.code == 404


def test_records_at_an_address_leave_the_page_on_this_machine(
    book: Book, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "AUDITS", tmp_path / "audits")
    records = MemoryStore("report-page")
    book.draw(records=records)
    assert Path(page.report_page.fn(str(book.published.root), records.uri)).parent == tmp_path / "audits" / "pages"


@pytest.mark.parametrize("fails", [False, True])
def test_the_flow_makes_it_after_the_last_audit(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A failed audit still has its page, and is what the flow ends in, whatever becomes of the page."""
    done: list[str] = []

    def audit(store: str, step: int, *others: str) -> None:
        done.append(f"audit {step}")
        if fails:
            words = ("verdict", "detail", "explanation", "next")
            raise AuditFailed({"piece": f"step {step}", "exit_code": 10} | dict.fromkeys(words, "no-match"))

    def report(store: str, records: str) -> None:
        done.append("page")
        raise OSError("disk full")

    monkeypatch.setattr(sample, "audit_step", audit)
    monkeypatch.setattr(sample, "draw_steps", lambda *arguments: {"2026-11-28": [3, 7]})
    monkeypatch.setattr(sample, "report_page", report)
    with pytest.raises(AuditFailed if fails else OSError):
        sample.nightly_sample.fn("somewhere/published", 2)
    assert done == ["audit 3", "audit 7", "page"]
