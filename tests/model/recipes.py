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
    merged, alone = RECIPES / f"{name}.yaml", RECIPES / f"{name}.run.yaml"
    if merged.exists():
        return ARITHMETIC | yaml.safe_load(merged.read_text(encoding="utf-8"))["run"]
    return ARITHMETIC | yaml.safe_load(alone.read_text(encoding="utf-8"))


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
