"""What a trained model is worth, by command and by flow, from a run that was really trained and published."""

from __future__ import annotations

from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.evaluate import evaluate
from storage.audit.certificate import verify
from storage.ledger import Ledger
from storage.store import LocalStore
from tests.flows import tiny
from tests.flows.conftest import result, verbatim


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
