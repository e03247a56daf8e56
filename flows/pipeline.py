"""The whole chain: raw text → windows → ledger and checkpoints → published run → audits."""

from __future__ import annotations

import time

from prefect import get_run_logger
from pydantic import BaseModel, ConfigDict

from flows.audit import audit
from flows.engine import flow
from flows.forms import Audits, Backend, Place, Recipe
from flows.naming import named, tagged
from flows.prepare import prepare
from flows.publish import publish
from flows.sample import nightly_sample
from flows.train import train
from tasks import show
from tasks.references import Audited, Mix, Places, Published, Trained, places


class Chain(BaseModel):
    """What each part of the chain gave."""

    model_config = ConfigDict(frozen=True)

    mix: Mix
    run: Trained
    release: Published
    audits: list[Audited]
    seconds: dict[str, float]


@flow(flow_run_name=named("pipeline", "folder", "recipe"))
def pipeline(recipe: Recipe = "demo", folder: Place = "", backend: Backend = "cpu", audits: Audits = 2) -> Chain:
    """Prepare, train, publish; then, from the published run alone, audit the initial state and a sample of steps.

    Args:
        recipe: A name in deployments/recipes, such as demo, or the path of a YAML file.
        folder: Where the run lives (windows in mix/, ledger and checkpoints in run/). Empty: runs/ and the recipe's
            name.
        backend: cpu is fast, nvidia faster on an NVIDIA GPU, reference plain NumPy and slow. It changes no bit.
        audits: How many steps to draw and audit, beside the initial state.
    """
    where = places(recipe, folder)
    with tagged(where.name):
        chain = _chain(recipe, where, backend, audits)
    _show(chain)
    return chain


def _chain(recipe: str, where: Places, backend: Backend, audits: int) -> Chain:
    root = str(where.root)
    clock = {"start": time.monotonic()}
    say = get_run_logger().info
    say("Preparing the mix; how far it is stands on the page of that part, under Subflow Runs")
    mix = prepare(recipe, root)
    clock["prepare"] = time.monotonic()
    say(f"Prepared, mix root {mix.mix_root}; training")
    run = train(recipe, root, backend)
    clock["train"] = time.monotonic()
    say(f"Trained {run.steps} steps, trajectory root {run.trajectory_root}; publishing")
    release = publish(root)
    clock["publish"] = time.monotonic()
    say(f"Published {release.objects} objects; auditing the initial state and {audits} steps")
    done = [audit(release.uri, None, backend, where.audits)]
    done += nightly_sample(release.uri, audits, backend, where.audits) if audits else []
    clock["audit"] = time.monotonic()
    seconds = {name: clock[name] - before for before, name in zip(clock.values(), list(clock)[1:])}
    return Chain(mix=mix, run=run, release=release, audits=done, seconds=seconds)


def _show(chain: Chain) -> None:
    mix, run, release = chain.mix, chain.run, chain.release
    verdicts = ", ".join(f"{audited.piece} {audited.verdict.upper()}" for audited in chain.audits)
    show.result(
        "chain",
        f"{run.steps} steps trained and published; audited: {verdicts or 'nothing'}",
        (
            show.link(release.uri),
            f"trajectory root `{run.trajectory_root}`",
            f"mix root `{mix.mix_root}`",
            ", ".join(f"{name} {value:.0f} s" for name, value in chain.seconds.items()),
        ),
    )
