"""The whole chain: raw text → windows → ledger and checkpoints → published run → audits."""

from __future__ import annotations

import time
from typing import Annotated

from prefect import flow
from pydantic import BaseModel, ConfigDict, Field

from flows.audit import audit
from flows.prepare import prepare
from flows.publish import publish
from flows.sample import nightly_sample
from flows.train import train
from tasks.references import Audited, Backend, Folder, Mix, Published, RecipeName, Trained, places

Audits = Annotated[
    int, Field(title="Audits", ge=0, description="How many steps to draw and audit, beside the initial state.")
]


class Chain(BaseModel):
    """What each part of the chain gave."""

    model_config = ConfigDict(frozen=True)

    mix: Mix
    run: Trained
    release: Published
    audits: list[Audited]
    seconds: dict[str, float]


@flow(flow_run_name="pipeline {recipe}")
def pipeline(recipe: RecipeName = "demo", folder: Folder = "", backend: Backend = "cpu", audits: Audits = 2) -> Chain:
    """Prepare, train, publish; then, from the published run alone, audit the initial state and a sample of steps."""
    where = places(recipe, folder)
    root = str(where.root)
    clock = {"start": time.monotonic()}
    mix = prepare(recipe, root)
    clock["prepare"] = time.monotonic()
    run = train(recipe, root, backend)
    clock["train"] = time.monotonic()
    release = publish(root)
    clock["publish"] = time.monotonic()
    done = [audit(release.uri, None, backend, where.audits)]
    done += nightly_sample(release.uri, audits, backend, where.audits) if audits else []
    clock["audit"] = time.monotonic()
    seconds = {name: clock[name] - before for before, name in zip(clock.values(), list(clock)[1:])}
    return Chain(mix=mix, run=run, release=release, audits=done, seconds=seconds)
