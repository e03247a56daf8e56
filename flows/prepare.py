"""Prepare: pinned text becomes windows, a manifest and a mix root."""

from __future__ import annotations

from flows.engine import flow
from flows.forms import Place, Recipe
from flows.naming import named, tagged
from tasks.prepare import prepare_mix
from tasks.references import Mix, places


@flow(flow_run_name=named("prepare", "folder", "recipe"))
def prepare(recipe: Recipe = "demo", folder: Place = "") -> Mix:
    """Cut a recipe's pinned text into windows. Doing it twice gives the same root; files already there are kept.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        folder: Where the run lives (windows in mix/, ledger and checkpoints in run/). Empty: runs/ and the recipe's
            name.
    """
    where = places(recipe, folder)
    with tagged(where.name):
        return prepare_mix(recipe, where.mix)
