"""Tasks of training: begin a run, train one segment in a process of its own, report what the run has become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from storage import checkpoint, figures
from storage import recipe as recipes
from storage.account import account
from storage.audit.keys import load_or_create_key
from storage.engine import load_backend
from storage.errors import MissingObject, Refused, VerbatimError
from storage.ledger import Ledger
from storage.memory import plan_for
from storage.page.curves import alone, loss_curve
from storage.run import create_run
from storage.store import Store, open_store
from storage.stream import Stream
from tasks import process, show
from tasks.device import turn
from tasks.process import ChildKilled, Event
from tasks.progress import Progress
from tasks.references import KEYS, Segment, Trained, key_name

MOST = 2000  # characters of a list of steps
ROWS = 1000  # of a table


@task(task_run_name="begin the run", cache_policy=NO_CACHE)
def begin_run(recipe: str, mix: str, run: str, backend: str) -> str:
    """Write the ledger's header, or check that the run that is there is this one. Returns the run id.

    Raises Refused where mix, recipe and run do not belong together or memory is too small, UsageError where
    the backend does not run here.
    """
    path, asked, arithmetic = recipes.find(recipe), recipes.load(recipe), load_backend(backend)
    try:
        stream = Stream.open(open_store(mix))
    except MissingObject:
        raise Refused(f"no windows are prepared in {mix}", next_step=f"verbatim prepare {recipe}") from None
    if stream.manifest.mix.spec != asked.mix.public():
        raise Refused(
            f"the mix in {mix} was prepared from another recipe than {path} is now",
            cause="the recipe's mix was changed after it was prepared",
            next_step="prepare it in another folder, or give the recipe that was prepared",
        )
    if asked.plan.processes > 1:  # before so many are started
        plan_for(asked.run, "training", arithmetic.device_memory(), asked.plan.processes)
    begun = create_run(
        open_store(run),
        stream,
        asked.run,
        load_or_create_key(KEYS, "trainer").public,
        arithmetic,
        path.read_bytes(),
    )
    return begun.ledger.run_id


def _was_killed(task: Any, task_run: TaskRun, state: State[Any]) -> bool:
    """A killed segment is worth another try; one that diverged or met a damaged file is not."""
    return isinstance(state.result(raise_on_failure=False), ChildKilled)


@task(
    task_run_name="train to step {until}",
    cache_policy=NO_CACHE,
    retries=5,
    retry_delay_seconds=1,
    retry_condition_fn=_was_killed,
)
def train_segment(recipe: str, run: str, mix: str, until: int, backend: str) -> Segment | None:
    """Train to step `until`, from the newest checkpoint; None if ledger, checkpoint and held-out loss reach that far.

    A segment that was killed, or of whose processes one was lost or hung, is tried again. Raises Refused where another
    process trains the run, VerbatimError where the segment was asked to stop before: a run that is not finished is no
    success.
    """
    plan = recipes.load(recipe).plan
    if until in _finished(open_store(run)):
        return None
    progress = Progress("Train", key_name("train", Path(run).parent.name), until, "steps, where this segment ends")
    request = {
        "run": run,
        "mix": mix,
        "until": until,
        "backend": backend,
        "checkpoint_every": plan.checkpoint_every,
        "diagnostics_every": plan.diagnostics_every,
        "processes": plan.processes,
    }
    log = get_run_logger().info
    with turn(backend):
        result = process.run("tasks.segment", request, lambda event: _show(progress, event), plan.processes, log)
    if result["outcome"] == "stopped":
        raise VerbatimError(
            f"training was asked to stop after step {result['last_step'] - 1}; its state is saved",
            cause="someone sent SIGTERM or SIGINT to the training process",
            next_step="train again: it goes on from there",
        )
    return Segment(
        first_step=result["first_step"],
        end_step=result["last_step"],
        validated=result["validated"],
        seconds=result["seconds"],
        head=result["head"],
        slow=result["slow"],
    )


def _finished(store: Store) -> list[int]:
    """Steps k ≤ the ledger's length for which checkpoint k exists and, what is written after it, its held-out loss."""
    steps, probes = len(Ledger(store)), set(store.list("probe/"))
    return [k for k in checkpoint.steps(store) if k <= steps and figures.probe_key(k) in probes]


def _show(progress: Progress, event: Event) -> None:
    if event["kind"] == "check":
        progress.before(event["done"], "; ".join(filter(None, (event["test"], event["note"]))))
    if event["kind"] == "result" and event["slow"]:
        progress(event["last_step"], event["slow"])
    if event["kind"] != "step":
        return
    repeated = ", repeated: equal" if event["validated"] else ""
    progress(event["step"] + 1, f"loss {'void' if event['loss'] is None else format(event['loss'], '.3f')}{repeated}")


def _by_source(probe: figures.Probe) -> dict[str, float | None]:
    return {name: loss.value() for name, loss in probe.sources.items()}


@task(task_run_name="report the run", cache_policy=NO_CACHE)
def report_run(run: str) -> Trained:
    """Read the whole ledger back, and show losses and roots, the result first."""
    found = account(open_store(run))
    held_out = list(found.held_out.items())
    ends = f"{held_out[0][1]:.3f} → {held_out[-1][1]:.3f}" if held_out else "none"
    show.result(
        "trained-run",
        f"{found.steps} steps, held-out loss {ends}",
        (
            f"trajectory root `{found.trajectory_root}`",
            f"ledger head `{found.ledger_head}`",
            f"mix root `{found.mix_root}`",
            f"repeated and equal: {', '.join(map(str, found.validated)) or 'none'}"[:MOST],
            f"run `{run}`",
        ),
        show.picture(alone(loss_curve(found.losses, found.held_out)), "loss of the steps, and held-out loss as dots"),
    )
    rows = [{"after steps": step, "all windows": loss, **_by_source(found.probes[step])} for step, loss in held_out]
    said = "Mean loss in nats over the held-out windows: of all, and of each source's"
    create_table_artifact(rows[-ROWS:], key="held-out", description=said)
    return Trained(uri=run, steps=found.steps, ledger_head=found.ledger_head, trajectory_root=found.trajectory_root)
