"""One audit in plain Python: what it found is said even where it cannot be kept."""

from pathlib import Path
from typing import Any

import pytest

from storage.audit.verdict import Outcome, Verdict
from storage.errors import StorageError
from tasks import replay


def test_the_verdict_is_not_lost_with_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> str:
        raise StorageError("certificates/x.json: No space left on device", cause="the disk is full")

    verdict = Verdict(Outcome.NO_MATCH, "step 3", "entry 3 differs", certificate=b"{}")
    monkeypatch.setattr(replay, "audit_step", lambda *arguments: verdict)
    monkeypatch.setattr(replay, "save_certificate", full)
    with pytest.raises(StorageError, match=r"step 3: no-match, but its certificate was not kept: .*No space left"):
        replay.audit(str(tmp_path), 3, "", "cpu", str(tmp_path / "records"), str(tmp_path / "keys"), print)
