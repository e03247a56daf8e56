"""What the demo promises: the README pins the roots that it checks itself against; its recipe is as described."""

from __future__ import annotations

import json
from pathlib import Path

from flows.demo import EXPECTED, KILL_IN_STEP
from model import schedule
from storage import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_pins_the_roots_that_the_demo_checks() -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert expected["mix_root"] in readme
    assert expected["trajectory_root"] in readme


def test_the_recipe_crosses_a_phase_and_is_killed_between_two_checkpoints() -> None:
    recipe = recipes.load("demo")
    assert recipe.run.model.parameter_count() == 3_541_248
    assert (recipe.steps, recipe.stops()) == (40, [15, 40])
    assert [schedule.plan(recipe.run, step).windows for step in (0, 29, 30, 39)] == [2, 2, 3, 3]
    assert recipe.stops()[0] < KILL_IN_STEP < recipe.steps
    assert KILL_IN_STEP % recipe.plan.checkpoint_every
