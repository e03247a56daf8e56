"""Reproduce a mix: rebuild it from the pinned sources in another folder and compare the roots."""

from __future__ import annotations

from prefect import flow

from flows.naming import named
from tasks.prepare import compare_mixes, prepare_mix
from tasks.references import Mix, places


@flow(flow_run_name=named("reproduce the mix of", "recipe"))
def reproduce_mix(recipe: str = "demo", folder: str = "") -> Mix:
    """Fails, naming the first source, file and window that differ, unless the rebuilt mix is the recorded one.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        folder: Where the run lives (windows in mix/, ledger and checkpoints in run/). Empty: runs/ and the recipe's
            name.
    """
    where = places(recipe, folder)
    rebuilt = prepare_mix(recipe, where.rebuilt_mix)
    compare_mixes(where.mix, rebuilt.uri)
    return rebuilt
