"""The records of steps that an H200 and the processors beside it agreed on, compared with each other and made again."""

from pathlib import Path

import pytest

from tests.device import steps

ENTRIES = Path(__file__).with_name("entries")


def test_both_machines_recorded_the_same() -> None:
    assert steps.compare(ENTRIES / "full.h200.jsonl", ENTRIES / "full.xeon.jsonl") == 0


def test_a_difference_is_found(tmp_path: Path) -> None:
    text = (ENTRIES / "full.xeon.jsonl").read_text(encoding="utf-8")
    (tmp_path / "other").write_text(text.replace('"loss": "41416117"', '"loss": "41416118"'), encoding="utf-8")
    (tmp_path / "none").write_text("", encoding="utf-8")
    (tmp_path / "cut").write_text(text[: text.index("\n") + 1], encoding="utf-8")
    assert steps.compare(ENTRIES / "full.h200.jsonl", tmp_path / "other") == 1
    assert steps.compare(ENTRIES / "full.h200.jsonl", tmp_path / "none") == 1
    assert steps.compare(ENTRIES / "full.h200.jsonl", tmp_path / "cut") == 1


@pytest.mark.slow
def test_this_machine_records_the_same(tmp_path: Path) -> None:
    steps.record("cpu", "small", tmp_path / "here")
    assert steps.compare(ENTRIES / "small.jsonl", tmp_path / "here") == 0
