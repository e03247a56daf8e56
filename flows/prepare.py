"""Prepare: pinned text becomes windows, a manifest and a mix root."""

from __future__ import annotations

from prefect import flow

from flows.naming import named
from tasks.prepare import prepare_mix
from tasks.references import Mix, places


@flow(flow_run_name=named("prepare", "recipe"))
def prepare(recipe: str = "demo", folder: str = "") -> Mix:
    """Cut a recipe's pinned text into windows. Doing it twice gives the same root; files already there are kept.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        folder: Where the run lives (windows in mix/, ledger and checkpoints in run/). Empty: runs/ and the recipe's
            name.
    """
    return prepare_mix(recipe, places(recipe, folder).mix)
