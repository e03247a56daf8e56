"""Train: segments, each a process of its own, until the run has all its steps."""

from __future__ import annotations

from pathlib import Path

from prefect import get_run_logger

from flows.engine import flow
from flows.forms import Backend, Place, Recipe
from flows.naming import named, tagged
from storage import recipe as recipes
from storage.errors import VerbatimError
from tasks.evaluate import score
from tasks.olmes import is_scored, ready
from tasks.references import Places, Trained, absolute, places
from tasks.train import begin_run, report_run, train_segment


@flow(flow_run_name=named("train", "folder", "recipe"))
def train(recipe: Recipe = "demo", folder: Place = "", backend: Backend = "cpu") -> Trained:
    """Train a prepared recipe to its end, or go on where it stopped.

    A segment that is killed is started again: it takes the newest whole checkpoint, repeats the steps that the ledger
    already has, compares each of them, and goes on. Where segments end on purpose is in the recipe's plan; so are the
    checkpoints that are asked tasks, by lm-eval. Where that fails training goes on to its end, and the flow fails then:
    started again, it repeats no step and asks what is missing.

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
        unscored: dict[int, Exception] = {}
        for end in asked.stops():
            # Called, not submitted: a cancellation reaches the main thread only.
            train_segment(recipe, where.run, where.mix, end, backend)
            if end in asked.scored() and (why := _failed_to_score(where, tasks, end)):
                unscored[end] = why
        trained = report_run(where.run)
        if unscored:
            raise Unscored(unscored, trained)
        return trained


def _failed_to_score(where: Places, tasks: Path, step: int) -> Exception | None:
    """Ask a checkpoint the tasks unless it was; why that failed, if it did."""
    try:
        if not is_scored(str(where.root), tasks, step, where.audits):
            score(str(where.root), str(tasks), step, where.audits)
    except Exception as error:  # whatever it is, hours of training are worth more
        get_run_logger().warning(f"state {step} was not scored, training goes on: {error}")
        return error
    return None


class Unscored(VerbatimError):
    """The run is trained to its end, and some of its checkpoints were not asked the tasks."""

    def __init__(self, why: dict[int, Exception], trained: Trained) -> None:
        states = ", ".join(map(str, why))
        super().__init__(
            f"all {trained.steps} steps of {trained.uri} are trained, but state {states} was not scored",
            cause=str(next(iter(why.values()))).partition("\n")[0],
            next_step="train again: no step is repeated, and what is missing is asked",
        )
