"""The arm64 emulation, without emulating: what it fetches, what it says where it cannot, what its rows count for."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import arm64, emulation, table
from tests.conformance.__main__ import ROWS
from tests.conformance.table import Row

PIN = re.compile(r"(\w+)==([\w.]+) --hash=sha256:[0-9a-f]{64}")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that counts as prepared, on a machine that has every tool."""
    monkeypatch.setattr(emulation, "FOLDER", tmp_path)
    monkeypatch.setattr(emulation, "_which", lambda *programs: f"/bin/{programs[0]}")
    (tmp_path / "ready").write_text(emulation._wanted())
    return tmp_path


def test_wheels_are_hashed_and_those_of_the_constraints_but_torch() -> None:
    wanted = (emulation.PROJECT / "constraints.txt").read_text().split()
    constraints = dict(line.split("==") for line in wanted if "==" in line)
    constraints = {name.replace("-", "_").lower(): version for name, version in constraints.items()}
    lines = [line for line in emulation.WHEELS.read_text().splitlines() if not line.startswith("#")]
    pins = {match[1]: match[2] for line in lines if (match := PIN.fullmatch(line))}
    assert len(pins) == len(lines)
    assert {name for name, version in pins.items() if constraints[name] != version} == {"torch"}


def test_both_targets_have_emulated_rows_and_compare_them_with_this_machine() -> None:
    assert [row.name for row in ROWS if row.emulated] == ["arm64, emulated"]
    assert [row for row in arm64.ROWS if not row.emulated] == [Row("everything this machine has")]
    assert {(row.backend, row.threads) for row in arm64.ROWS if row.emulated} >= {("cpu", 1), ("cpu", 2)}


def test_an_unprepared_machine_does_not_run_the_row(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulation.missing() == ""
    (prepared / "ready").write_text("other wheels")
    assert table.show([Row("arm64, emulated", emulated=True)]) == 1
    assert "not run: make arm64 prepares it\n0 rows ran; nothing was compared" in capsys.readouterr().out


def test_a_prepared_machine_without_qemu_says_so(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_which", lambda *programs: None)
    assert emulation.missing() == "no qemu-aarch64-static: make arm64 installs it"


def test_without_qemu_and_without_root_the_error_is_the_command_to_type(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulation, "_which", lambda *programs: None if programs == emulation.QEMU else "/bin/true")
    monkeypatch.setattr(emulation, "KEYRING", prepared / "ready")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert arm64.main() == 2
    assert capsys.readouterr().err.endswith("try: sudo apt-get install qemu-user-static && make arm64\n")


def test_root_installs_what_is_missing(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(emulation, "_which", lambda *programs: None if programs == emulation.QEMU else "/bin/true")
    monkeypatch.setattr(emulation, "KEYRING", prepared / "ready")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(emulation, "_call", lambda *arguments: calls.append(arguments))
    emulation._install_tools()
    assert [call[:2] for call in calls] == [("apt-get", "update"), ("apt-get", "install")]
    assert calls[1][-1] == "qemu-user-static"


def test_the_mirror_is_debian_s_own_archive_among_apt_s_sources() -> None:
    others = "https://a.invalid/nodesource|. nodistro|. nodistro\nhttp://b.invalid/security/|Debian|Debian-Security\n"
    assert emulation.mirror(others + "http://c.invalid/debian/|Debian|Debian\n") == "http://c.invalid/debian/"
    with pytest.raises(
        emulation.NotPossible, match=r"found: http://b\.invalid/security/, https://a\.invalid/nodesource;"
    ):
        emulation.mirror(others)


def test_a_failing_program_is_named_with_what_it_said() -> None:
    with pytest.raises(emulation.NotPossible, match=r"ended with 3:\nno such suite"):
        emulation._call(sys.executable, "-c", "import sys; print('no such suite'); sys.exit(3)")


def test_an_emulated_row_sees_its_own_folders_only(prepared: Path) -> None:
    row = Row("arm64, emulated", emulated=True)
    python = str(prepared / "root/usr/bin/python3.11")
    root = str(prepared / "root")
    assert row.command()[:6] == ["/bin/qemu-aarch64-static", "-cpu", "cortex-a76", "-L", root, python]
    environment = row.environment()
    assert environment["PYTHONPATH"].split(":") == [str(table.ROOT), str(prepared / "site")]
    assert {environment[name].startswith(str(prepared)) for name in ("PYTHONHOME", "NUMBA_CACHE_DIR")} == {True}


@pytest.mark.parametrize(
    ("second", "code", "said"),
    [
        ({"failing": [], "trajectory": "aa"}, 0, "2 rows ran; one trajectory root, every vector equal"),
        ({"failing": [], "trajectory": "bb"}, 1, "2 rows ran; THEY DIFFER"),
        ({"failing": ["norm 1.1.1 plain"], "trajectory": "aa"}, 1, "differs: norm 1.1.1 plain"),
    ],
)
def test_any_difference_is_an_exit_code(
    second: dict[str, Any], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[str, dict[str, Any]] = {"first": {"failing": [], "trajectory": "aa"}, "second": second}
    monkeypatch.setattr(table, "_run", lambda row: {**results[row.name], "describe": {}})
    absent = Row("needs what no processor has", needs="flux_capacitor")
    assert table.show([Row("first"), absent, Row("second")]) == code
    printed = capsys.readouterr().out
    assert said in printed and "not run: this processor has no flux_capacitor" in printed


@pytest.mark.parametrize(
    ("script", "said"), [("raise SystemExit('no luck')", "no luck"), ("import time; time.sleep(60)", "after 1 s")]
)
def test_a_row_that_dies_or_hangs_is_a_difference(script: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECONDS", "REPORT_SECONDS"):
        monkeypatch.setattr(table, name, 1)
    monkeypatch.setattr(Row, "command", lambda self: [sys.executable, "-c", script])
    found = table._run(Row("any"))
    assert found["trajectory"] == "none" and said in found["failing"][0]


def test_a_row_s_result_is_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"failing": [], "trajectory": "aa", "describe": {}}
    script = f"print('noise'); print({json.dumps(answer)!r})"
    monkeypatch.setattr(Row, "command", lambda self: [sys.executable, "-c", script])
    assert table._run(Row("any")) == answer
