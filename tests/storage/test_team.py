"""What a team says of itself, before it begins and while it works, and what a recipe may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from model.stage import STAGE
from storage import recipe, team
from storage.errors import UsageError
from storage.team import Led, Work, idle_turns
from tests.storage import small


@pytest.mark.parametrize(("work", "missed"), [("step", "step"), ("save", "")])
def test_rank_zero_that_writes_a_checkpoint_in_place_is_not_missed(work: Work, missed: str) -> None:
    """Those that wait for a rank which is at a work of all end it after a while; a disk may take longer than that."""
    group: Any = object()
    with mock.patch.object(team, "told") as told, Led(group).doing(work):
        assert STAGE.work == missed
    told.assert_called_once_with({"work": work, "diagnose": False})


def test_batch_plans_that_idle_ranks_are_reported() -> None:
    assert idle_turns(small.spec(), 1) == ""  # steps of 2 and of 3 units
    assert idle_turns(small.spec(), 2) == "2 processes idle in 1 of 4 turns of a step of 3 units"
    four = "4 processes idle in 2 of 4 turns of a step of 2 units; 1 of 4 turns of a step of 3 units"
    assert idle_turns(small.spec(), 4) == four


def test_a_recipe_says_how_many_processes_share_a_step(tmp_path: Path) -> None:
    plain = yaml.safe_load(recipe.find("demo").read_text())
    assert recipe.load("demo").plan.processes == 1
    for number in (3, 0):
        plain["plan"]["processes"] = number
        (tmp_path / "asked.yaml").write_text(yaml.safe_dump(plain))
        if number:
            assert recipe.load(tmp_path / "asked.yaml").plan.processes == number
    with pytest.raises(UsageError, match=r"plan\.processes.*greater than or equal to 1"):
        recipe.load(tmp_path / "asked.yaml")
