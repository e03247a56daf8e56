"""Prepare: pinned text becomes windows, a manifest and a mix root."""

from __future__ import annotations

from prefect import flow

from tasks.prepare import prepare_mix
from tasks.references import Folder, Mix, RecipeName, places


@flow(flow_run_name="prepare {recipe}")
def prepare(recipe: RecipeName = "demo", folder: Folder = "") -> Mix:
    """Cut a recipe's pinned text into windows. Doing it twice gives the same root; files already there are kept."""
    return prepare_mix(recipe, places(recipe, folder).mix)
