"""Train: segments, each a process of its own, until the run has all its steps."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.forms import Backend, Place, Recipe
from flows.naming import named, tagged
from storage import recipe as recipes
from tasks.evaluate import score
from tasks.olmes import is_scored, ready
from tasks.references import Trained, absolute, places
from tasks.train import begin_run, report_run, train_segment


@flow(flow_run_name=named("train", "folder", "recipe"))
def train(recipe: Recipe = "demo", folder: Place = "", backend: Backend = "cpu") -> Trained:
    """Train a prepared recipe to its end, or go on where it stopped.

    A segment that is killed is started again: it takes the newest whole checkpoint, repeats the steps that the ledger
    already has, compares each of them, and goes on. Where segments end on purpose is in the recipe's plan; so are the
    checkpoints that are asked tasks, by lm-eval.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        folder: Where the run lives (windows in mix/, ledger and checkpoints in run/). Empty: runs/ and the recipe's
            name.
        backend: cpu is fast, nvidia faster on an NVIDIA GPU, reference plain NumPy and slow. It changes no bit.
    """
    where, asked = places(recipe, folder), recipes.load(recipe)
    tasks = Path(absolute(asked.plan.tasks))
    if asked.plan.tasks:
        ready(tasks)  # before hours of training
    with tagged(where.name):
        begin_run(recipe, where.mix, where.run, backend)
        for end in asked.stops():
            # Called, not submitted: a cancellation reaches the main thread only.
            train_segment(recipe, where.run, where.mix, end, backend)
            if end in asked.scored() and not is_scored(str(where.root), tasks, end, where.audits):
                score(str(where.root), str(tasks), end, where.audits)
        return report_run(where.run)
