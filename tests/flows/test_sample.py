"""The nightly sample answers every step that it drew."""

from __future__ import annotations

import pytest

from flows import sample
from tasks.audit import AuditFailed


def test_a_failed_audit_does_not_leave_the_others_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []

    def audit(store: str, step: int, backend: str, records: str, night: str) -> None:
        seen.append((step, night))
        if step == 3:
            words = ("verdict", "detail", "explanation", "next")
            raise AuditFailed({"piece": "step 3", "exit_code": 10} | dict.fromkeys(words, "no-match"))

    monkeypatch.setattr(sample, "audit_step", audit)
    monkeypatch.setattr(sample, "draw_steps", lambda *arguments: {"2026-11-28": [3], "2026-11-29": [7]})
    with pytest.raises(AuditFailed, match="step 3"):
        sample.nightly_sample.fn("somewhere/published", 2)
    assert seen == [(3, "2026-11-28"), (7, "2026-11-29")]
