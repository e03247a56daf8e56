"""Trainers that cheat in one step, with honest records of it: each is found by an audit of that step, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.audit.keys import Key
from storage.audit.narrow import Watch
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome, Verdict
from tests.attacks import scene
from tests.attacks.scene import AT, Cheat
from tests.storage.conftest import Small

ALL = ("loss", "z_loss", "grad_norm", "gradient", "state")


def audited(made: Small, auditor: Key, step: int = AT) -> tuple[Verdict, Watch]:
    watch = Watch()
    return audit_step(made.published, step, "cpu", auditor, witness=watch), watch


@pytest.mark.parametrize("step", range(scene.STEPS))
def test_the_unattacked_twin_matches(honest: Small, auditor: Key, step: int, ends: Callable[[str], None]) -> None:
    verdict, watch = audited(honest, auditor, step)
    assert (verdict.outcome, verdict.fields, watch.place, watch.contradicted) == (Outcome.MATCH, (), None, "")
    ends(scene.said(verdict))


HEAD = "head_backward of head, in some unit"
UP = "blocks.000.gate_up"
# Cheat, differing fields, first differing tensor, first operation that the ledger contradicts.
CHEATS: dict[str, tuple[Cheat, tuple[str, ...], str, str]] = {
    "the data of the first unit swapped": (scene.swapped_window(0), ALL, "gradient/blocks.000.attn_norm", HEAD),
    "the data of the second unit swapped": (scene.swapped_window(1), ALL, "gradient/blocks.000.attn_norm", HEAD),
    "a small integer added to a gradient": (
        scene.added_to_a_gradient(UP), ("gradient", "state"), f"gradient/{UP}",
        f"linear_backward of {UP}, in some unit",
    ),
    "an update left out": (scene.no_update, ("state",), "m/blocks.000.attn_norm", "adamw of blocks.000.attn_norm"),
    "a rate off by one": (scene.rate_off_by_one, ("state",), "weights/blocks.000.down", "adamw of blocks.000.down"),
}  # fmt: skip


@pytest.mark.parametrize("name", scene.quick(CHEATS, "the data of the second unit swapped", "a rate off by one"))
def test_a_cheat_is_found_and_narrowed(
    begun: Small, auditor: Key, tmp_path: Path, name: str, ends: Callable[[str], None]
) -> None:
    cheat, fields, first, contradicted = CHEATS[name]
    made = scene.trained(begun, tmp_path / "run", cheat)
    verdict, watch = audited(made, auditor)
    assert (verdict.outcome, verdict.exit_code, verdict.differs_at) == (Outcome.NO_MATCH, 10, AT)
    assert (verdict.fields, verdict.tensors[0], watch.contradicted) == (fields, first, contradicted)
    assert audited(made, auditor, AT - 1)[0].outcome is Outcome.MATCH  # an audit proves the step that it replays
    ends(scene.said(verdict))


def test_weights_spliced_from_a_twin_run(
    begun: Small, auditor: Key, tmp_path: Path, spliced: Cheat, ends: Callable[[str], None]
) -> None:
    """Every weight is another and each is named; gradients and moments are the run's own."""
    made = scene.trained(begun, tmp_path / "run", spliced)
    verdict, watch = audited(made, auditor)
    weights = tuple(sorted(f"weights/{name}" for name in made.release().spec.model.shapes()))
    assert (verdict.outcome, verdict.fields, verdict.tensors) == (Outcome.NO_MATCH, ("state",), weights)
    assert watch.contradicted == "adamw of blocks.000.attn_norm"
    ends(scene.said(verdict))


def test_a_recorded_rate_off_by_one_needs_no_replay(
    begun: Small, auditor: Key, tmp_path: Path, ends: Callable[[str], None]
) -> None:
    """Spec and schedule give the rate of every step, so that each audit finds it, of whatever step."""
    made = scene.trained(begun, tmp_path / "run", scene.recorded_rate_off_by_one)
    for step in (0, AT):
        verdict = audited(made, auditor, step)[0]
        assert (verdict.exit_code, verdict.differs_at, verdict.fields) == (10, AT, ("lr",))
        assert verdict.certificate is None
        ends(scene.said(verdict))
