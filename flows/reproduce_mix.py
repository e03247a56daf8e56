"""Reproduce a mix: rebuild it from the pinned sources in another folder and compare the roots."""

from __future__ import annotations

from prefect import flow

from tasks.prepare import compare_mixes, prepare_mix
from tasks.references import Folder, Mix, RecipeName, places


@flow(flow_run_name="reproduce the mix of {recipe}")
def reproduce_mix(recipe: RecipeName = "demo", folder: Folder = "") -> Mix:
    """Fails, naming the first source, file and window that differ, unless the rebuilt mix is the recorded one."""
    where = places(recipe, folder)
    rebuilt = prepare_mix(recipe, where.rebuilt_mix)
    compare_mixes(where.mix, rebuilt.uri)
    return rebuilt
