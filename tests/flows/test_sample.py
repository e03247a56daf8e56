"""The nightly sample answers every step that it drew."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import sample
from storage.audit.keys import Key
from storage.audit.settle import settle
from tasks import sample as task
from tasks.audit import AuditFailed
from tests.storage.drawn import DATE, Book, at, hourly


def test_a_failed_audit_does_not_leave_the_others_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def audit(store: str, step: int, backend: str, records: str, night: str) -> None:
        seen.append((step, night))
        if step == 3:
            words = ("verdict", "detail", "explanation", "next")
            raise AuditFailed({"piece": "step 3", "exit_code": 10} | dict.fromkeys(words, "no-match"))

    monkeypatch.setattr(sample, "audit_step", audit)
    monkeypatch.setattr(sample, "draw_steps", lambda *arguments: {"2026-11-28": [3], "2026-11-29": [7]})
    monkeypatch.setattr(sample, "report_page", lambda *arguments: "")
    with pytest.raises(AuditFailed, match="step 3"):
        sample.nightly_sample.fn("somewhere/published", 2)
    assert seen == [(3, "2026-11-28"), (7, "2026-11-29")]


def test_a_draw_that_was_made_before_the_wait_is_audited_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A month ago a night was stated and not drawn; it is drawn at once, and today's a while later."""
    caplog.set_level(logging.INFO, logger="sample")
    book, source, clock = Book(tmp_path), hourly(monkeypatch), [at(DATE)]
    old = (at(DATE) - timedelta(days=30)).date().isoformat()
    settle(book.records, book.ledger, book.trainer, source, 2, at(old))

    def key(folder: Path, name: str) -> Key:
        return book.trainer if name == "trainer" else book.key(name)

    def wait(seconds: float) -> None:
        clock[0] += timedelta(seconds=seconds)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return clock[0]

    for name, value in (
        ("datetime", Clock),
        ("time", SimpleNamespace(sleep=wait)),
        ("open_source", lambda *given: source),
        ("load_or_create_key", key),
        ("load_key", key),
        ("_show", lambda *given: None),
        ("get_run_logger", lambda: logging.getLogger("sample")),
    ):
        monkeypatch.setattr(task, name, value)
    drawn = task.draw_steps.fn(str(book.published.root), 2, str(book.records.root))
    assert list(drawn) == [old, DATE] and [len(steps) for steps in drawn.values()] == [2, 2]
    assert clock == [at(DATE, "04:00:00")]
    assert "the steps follow at 04:00:00 UTC" in caplog.text
    again = task.draw_steps.fn(str(book.published.root), 2, str(book.records.root))
    assert again == {DATE: drawn[DATE]}
