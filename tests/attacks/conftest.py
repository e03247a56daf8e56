"""The honest run, once; the self-test, once for real; a no-match is repeated in this process, since a fresh one takes
half a minute. That it is a fresh one in earnest, tests/faults/test_audit_machine.py shows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from storage import checkpoint, engine
from storage.audit import again, confirm
from storage.audit.keys import Key, load_or_create_key
from storage.audit.open import open_step
from tests.attacks import ATTACKS, VERDICTS, scene, test_of
from tests.attacks.scene import AT, Cheat
from tests.storage.conftest import Small
from tests.storage.opened import drawn


@pytest.fixture(scope="package", autouse=True)
def _one_process() -> Iterator[None]:
    engine.self_test("cpu")
    with (
        mock.patch.object(confirm, "repeat", again.found),
        mock.patch.object(engine, "_self_test", lambda backend, report: []),
        mock.patch("os.fsync", lambda file: None),
    ):
        yield


@pytest.fixture(scope="package")
def begun(tmp_path_factory: pytest.TempPathFactory, _one_process: None) -> Small:
    return scene.begin(tmp_path_factory.mktemp("begun") / "run")


@pytest.fixture(scope="package")
def honest(begun: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The unattacked twin of every attack."""
    return scene.trained(begun, tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture(scope="package")
def spliced(begun: Small, tmp_path_factory: pytest.TempPathFactory) -> Cheat:
    """The cheat that takes weights from a run of another seed."""
    folder = tmp_path_factory.mktemp("twin")
    twin = scene.trained(scene.begin(folder / "begun", seed=8), folder / "run")
    return scene.spliced(checkpoint.load(twin.store, twin.run().ledger, 5).weights)


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture(scope="package")
def opened(honest: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The honest run, step AT opened."""
    folder = tmp_path_factory.mktemp("opened") / "run"
    shutil.copytree(honest.folder, folder)
    made = Small(folder)
    open_step(made.published, AT, drawn(made), "cpu")
    return made


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Says what an attack, or its twin, ended in: it must be what the list of attacks has."""

    def ended(verdict: str) -> None:
        assert verdict == VERDICTS[test_of(request.node.nodeid)]
        request.node.user_properties.append(("verdict", verdict))

    return ended


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of attacks, of what really ran."""
    found: dict[str, set[str]] = {}
    seconds: dict[str, float] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        test = test_of(getattr(report, "nodeid", ""))
        if test and getattr(report, "when", "") == "call":
            said = dict(report.user_properties).get("verdict", "nothing") if report.passed else "FAILED"
            found.setdefault(test, set()).add(str(said))
            seconds[test] = seconds.get(test, 0) + report.duration
    if not found:
        return
    terminalreporter.section("attack, what it ended in, its unattacked twin")
    for attack in ATTACKS:
        verdicts = sorted({said for test in attack.tests for said in found.get(test, {"did not run"})})
        twin = "; ".join(sorted(found.get(attack.twin, {"did not run"})))
        took = sum(seconds.get(test, 0) for test in attack.tests)
        terminalreporter.line(f"{attack.name:74} {'; '.join(verdicts):56} {twin:28} {took:6.1f} s")
