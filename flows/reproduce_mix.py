"""Reproduce a mix: rebuild it from the pinned sources in an empty folder and compare the roots."""

from __future__ import annotations

from flows.engine import flow
from flows.forms import Place, Recipe
from flows.naming import named, tagged
from tasks.prepare import claim_folder, compare_mixes, prepare_mix
from tasks.references import Mix, absolute, places


@flow(flow_run_name=named("reproduce the mix of", "folder", "recipe"))
def reproduce_mix(recipe: Recipe = "demo", published: Place = "", folder: Place = "") -> Mix:
    """Fails, naming the first source, file and window that differ, unless the rebuilt mix is the recorded one.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        published: What to compare with: the address of a published run, of a run's folder or of a mix; its manifest is
            enough. Empty: the run's own folder.
        folder: Where the run lives; the mix is made anew in rebuilt-mix/ below it, which must be empty, or a rebuild
            that the same code with the same libraries began. Empty: runs/ and the recipe's name.
    """
    where = places(recipe, folder)
    recorded = absolute(published) if published else where.mix
    with tagged(where.name):
        claim_folder(recorded, where.rebuilt_mix)
        rebuilt = prepare_mix(recipe, where.rebuilt_mix)
        compare_mixes(recorded, rebuilt.uri)
    return rebuilt
