"""The run sections of the committed recipes, for tests of the model alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from model.spec import RunSpec

RECIPES = Path(__file__).resolve().parents[2] / "deployments" / "recipes"
ARITHMETIC = {"contract": "test", "vectors": "0" * 64}  # named here, so that these tests need no kernels


def run_section(name: str) -> dict[str, Any]:
    """The `run` part of a recipe as plain values."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    return ARITHMETIC | yaml.safe_load(text)["run"]


def run_spec(name: str) -> RunSpec:
    """The `run` part of a recipe, checked."""
    return RunSpec.model_validate(run_section(name))


def changed(section: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `section` with the value at a dotted path replaced."""
    copy = deepcopy(section)
    *folders, last = path.split(".")
    place = copy
    for folder in folders:
        place = place[folder]
    place[last] = value
    return copy
