"""The honest run, once; the self-test, once for real; a no-match is repeated in this process, since a fresh one takes
half a minute. That it is a fresh one in earnest, tests/faults/test_audit_machine.py shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from storage import checkpoint, engine
from storage.audit import again, confirm
from storage.audit.keys import Key, load_or_create_key
from tests.attacks import scene
from tests.attacks.scene import Cheat
from tests.storage.conftest import Small


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
