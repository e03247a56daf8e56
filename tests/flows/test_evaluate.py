"""What a trained model is worth, by command and by flow, from a run that was really trained and published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.evaluate import evaluate
from flows.train import train
from storage.audit.certificate import verify
from storage.errors import VerbatimError
from storage.ledger import Ledger
from storage.olmes import scores_of
from storage.store import LocalStore
from tasks import olmes
from tests.flows import tiny
from tests.flows.conftest import result, verbatim
from tests.storage.test_olmes import RESULT, TINY

pytestmark = pytest.mark.slow


def test_held_out_losses_are_compared_with_what_was_published(folder: Path, tmp_path: Path) -> None:
    kept = ("--backend", "reference", "--records", tmp_path / "records", "--keys", tmp_path / "keys")
    found = result("evaluate", folder / "published", "--step", "8", *kept)
    assert (found["verdict"], found["piece"]) == ("match", "held-out 8")
    ledger = Ledger(LocalStore(folder / "published"))
    assert verify(Path(found["certificate"]).read_bytes(), ledger, "held-out 8").body.verdict == "match"
    assert "genuine" in verbatim("verify", folder / "published", found["certificate"]).stdout
    refused = verbatim("evaluate", folder / "published", "--step", "7", *kept, expect=13).stdout
    assert "the release holds no probe/00000007.json" in refused
    shown = verbatim("evaluate", folder, "--step", "8", "--backend", "reference").stdout
    assert shown.startswith("state 8: ") and "(alpha " in shown and "beta " in shown


def test_a_model_goes_on_with_a_text(folder: Path) -> None:
    said = verbatim("generate", folder / "published", "--prompt", "a few words", "--tokens", "8").stdout
    assert said.startswith("a few words") and len(said) > len("a few words\n")


def test_the_flow_checks_the_last_checkpoint(api: str, folder: Path, tmp_path: Path) -> None:
    with temporary_settings({PREFECT_API_URL: api}):
        audited, scored = evaluate(str(folder / "published"), None, "", "reference", str(tmp_path / "records"))
    assert (audited.piece, audited.verdict, audited.step) == (f"held-out {tiny.STEPS}", "match", tiny.STEPS)
    assert scored is None and audited.certificate and Path(audited.certificate).exists()


def asked_by(folder: Path, failing: int) -> Path:
    """A python that answers as lm-eval's would, but for one call."""
    path, answer = folder / "python", json.dumps(RESULT)
    count = f'n=$(cat "{folder}/n" 2>/dev/null || echo 0); n=$((n+1)); echo $n > "{folder}/n"'
    fail = f"[ $n = {failing} ] && {{ echo 'KeyError: no such column' >&2; exit 1; }}"
    path.write_text(f"#!/bin/sh\n{count}\n{fail}\ncat > \"$5\" <<'END'\n{answer}\nEND\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_checkpoints_are_scored_while_training_and_what_failed_is_asked_again(
    api: str, folder: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 12 steps with a checkpoint every 4, each is asked; the second time lm-eval fails."""
    shutil.copytree(folder / "mix", tmp_path / "run" / "mix")
    document = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    document["plan"] |= {"score_every": 1, "tasks": str(TINY)}
    asked = tmp_path / "recipe.yaml"
    asked.write_text(yaml.safe_dump(document), encoding="utf-8")
    monkeypatch.setattr(olmes, "PYTHON", asked_by(tmp_path, failing=2))
    run, records = tmp_path / "run", LocalStore(tmp_path / "run" / "audits")
    with temporary_settings({PREFECT_API_URL: api}):
        with pytest.raises(VerbatimError, match=r"all 12 steps of .* but state 8 was not scored(.|\n)*no such column"):
            train(str(asked), str(run), "reference")
        ledger = Ledger(LocalStore(run / "run"))
        assert len(ledger) == tiny.STEPS and scores_of(records, ledger).keys() == {4, 12}
        entries, before = ledger.head, records.list()
        assert train(str(asked), str(run), "reference").steps == tiny.STEPS
    ledger = Ledger(LocalStore(run / "run"))
    assert ledger.head == entries and set(before) < set(records.list())
    found = scores_of(records, ledger)
    assert {step: [body.state for body in found[step]] for step in found} == {
        step: [ledger.state_root(step)] for step in (4, 8, 12)
    }
    assert (tmp_path / "n").read_text().strip() == "4"
