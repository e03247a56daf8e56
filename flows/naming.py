"""Names of flow runs in the UI's lists: what is done to which run, without folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect.runtime import flow_run


def named(verb: str, parameter: str) -> Callable[[], str]:
    """A `flow_run_name`: the verb and the last name of the path in this parameter, as in "train demo"."""

    def name() -> str:
        return f"{verb} {short(str(flow_run.parameters[parameter]))}"

    return name


def short(path: str) -> str:
    """The run that a recipe, its folder or its published copy belongs to: runs/demo/published -> demo."""
    parts = [part for part in Path(path.removesuffix(".yaml")).parts if part != "published"]
    return parts[-1] if parts else path
