"""A trainer who cheats in step AT alone, links everything after it honestly, and opens the step as it suits him.

Each cheat is caught by the piece that can see it and by no other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.audit.certificate import verify
from storage.audit.fingerprints import chosen_tensor
from storage.audit.keys import Key
from storage.audit.open import open_step
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from tests.attacks import scene
from tests.attacks.scene import AT, Cheat
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.opened import BEACON, MATCHES, STEP, drawn, outcomes, verdicts

NAMED = chosen_tensor(list(small.spec().model.shapes()), BEACON.value, STEP)
OTHER = next(name for name in small.spec().model.shapes() if name != NAMED)
CHEATS: dict[str, tuple[Cheat, str]] = {
    "one unit's data swapped": (scene.swapped_window(1), "unit 1"),
    "an integer added to the named gradient": (scene.added_to_a_gradient(NAMED), "sum"),
    # What one parameter of all cannot say; an audit of the step does.
    "an integer added to another gradient": (scene.added_to_a_gradient(OTHER), ""),
    "an update left out": (scene.no_update, "update"),
    "a rate off by one": (scene.rate_off_by_one, "update"),
}
LISTED = ("one unit's data swapped", "an update left out")


def test_every_piece_of_the_unattacked_twin_matches(opened: Small, auditor: Key, ends: Callable[[str], None]) -> None:
    found = verdicts(opened, auditor)
    assert outcomes(found) == MATCHES, [verdict.detail for verdict in found.values()]
    ends(scene.said(found[f"step {STEP} sum"]))


@pytest.mark.parametrize("name", scene.quick(CHEATS, "one unit's data swapped", "an update left out"))
def test_each_cheat_is_caught_by_its_piece_and_no_other(
    begun: Small, auditor: Key, tmp_path: Path, name: str, ends: Callable[[str], None]
) -> None:
    assert AT == STEP
    cheat, caught = CHEATS[name]
    made = scene.trained(begun, tmp_path / "cheat", cheat)
    with scene.opening(cheat):
        open_step(made.published, STEP, drawn(made), "cpu")
    found = verdicts(made, auditor)
    assert outcomes(found) == MATCHES | ({caught: "no-match"} if caught else {}), [v.detail for v in found.values()]
    assert audit_step(made.published, STEP, "cpu", auditor).outcome is Outcome.NO_MATCH
    if caught:
        verdict = found[f"step {STEP} {caught}"]
        assert verdict.certificate
        body = verify(verdict.certificate, made.release().ledger, verdict.piece).body
        assert body.verdict == "no-match" and body.recorded != body.reproduced
    if name in LISTED:
        ends(f"{caught} {scene.said(found[f'step {STEP} {caught}'])}, all others match")
