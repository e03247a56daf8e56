"""What is bad in one copy of a release: how the command line and the flow say so. The model is the stand-in."""

import json
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner, Result

from flows.audit import audit
from flows.cli import app
from storage.errors import InputFault
from storage.ledger import part_key
from storage.publish import publish
from storage.store import LocalStore
from tasks import process, replay
from tests.storage.conftest import Small, _original, made, stand_in  # noqa: F401  (fixtures)

MANIFEST, PART = "mix/manifest.json", part_key(3)


@pytest.fixture
def copies(made: Small) -> tuple[str, str]:  # noqa: F811
    """A bad copy, in which two objects are NUL, and a sound one."""
    publish(made.store, made.mix, LocalStore(made.folder / "sound"), made.key)
    for key in (MANIFEST, PART):
        made.published.path(key).write_bytes(bytes(made.published.size(key)))
    return str(made.published.root), str(made.folder / "sound")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_command_takes_it_from_another_and_names_it(copies: tuple[str, str], tmp_path: Path) -> None:
    bad, sound = copies
    step = ("--step", "3", "--records", tmp_path / "records", "--keys", tmp_path / "keys")
    alone = run("audit", bad, *step, "--json")
    assert alone.exit_code == 11 and PART in json.loads(alone.stdout)["detail"]
    found = json.loads(run("audit", bad, "--mirror", sound, *step, "--json").stdout)
    named = {(copy["store"], copy["key"]) for copy in found["bad_copies"]}
    assert (found["verdict"], found["exit_code"]) == ("match", 0)
    assert named == {(Path(bad).as_uri(), MANIFEST), (Path(bad).as_uri(), PART)}
    shown = run("audit", bad, "--mirror", sound, *step)
    assert shown.exit_code == 0 and f"bad copy: {Path(bad).as_uri()}: {PART}: " in shown.stdout
    shown = run("verify", bad, "--mirror", sound)
    assert shown.exit_code == 0 and shown.stdout.count("genuine: ") == 2
    assert f"bad copy: {Path(bad).as_uri()}: {MANIFEST}: " in shown.stdout
    checked = run("verify", bad, found["certificate"], "--mirror", sound)
    assert (
        checked.exit_code == 0
        and "step 3 match" in checked.stdout
        and f"bad copy: {Path(bad).as_uri()}" in checked.stdout
    )


def test_a_flow_takes_it_from_another(
    api: str, copies: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit's own process knows nothing of the stand-in, so it is done in this one."""

    def here(module: str, request: dict[str, Any], report: Any, log: Any) -> dict[str, Any]:
        assert module == "tasks.replay" and json.loads(json.dumps(request)) == request
        return replay.audit(**request | {"keys": str(tmp_path / "keys")}, report=lambda progress: None)

    monkeypatch.setattr(process, "run", here)
    with temporary_settings({PREFECT_API_URL: api}):
        audited = audit(copies[0], 3, "reference", str(tmp_path / "records"), (copies[1],))
    assert (audited.verdict, audited.bad_copies) == ("match", 2)


def test_a_question_takes_it_from_another_too(copies: tuple[str, str]) -> None:
    bad, sound = copies
    assert isinstance(run("docs", bad, "--step", "3").exception, InputFault)
    found = json.loads(run("docs", bad, "--mirror", sound, "--step", "3", "--json").stdout)
    assert (Path(bad).as_uri(), MANIFEST) in {(copy["store"], copy["key"]) for copy in found["bad_copies"]}
    alone = json.loads(run("docs", sound, "--step", "3", "--json").stdout)
    assert found["documents"] == alone["documents"] and found["windows"] == alone["windows"]
    assert f"bad copy: {Path(bad).as_uri()}: {MANIFEST}: " in run("docs", bad, "--mirror", sound, "--step", "3").stdout
