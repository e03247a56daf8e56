"""Preparation as tasks: each stage of it is one, or on a Ray cluster several; and the comparison of two mixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner

from storage import recipe as recipes
from storage.corpus import made_with
from storage.corpus.compare import first_difference
from storage.corpus.manifest import Manifest
from storage.corpus.pool import Done, Run, processes, serially
from storage.corpus.prepare import prepare
from storage.errors import Divergence, UsageError
from storage.processes import cores
from storage.questions import open_mix
from storage.store import open_store
from tasks import show
from tasks.progress import Progress
from tasks.references import CACHE, Mix, key_name

MB = 10**6
SHARES = 4  # tasks of a stage for each worker of a cluster: the last to end should not keep the others waiting


def prepare_mix(recipe: str, mix: str) -> Mix:
    """Fetch, read, tokenize, sort, write, for a flow to call. Idempotent: what a former call finished is kept."""
    loaded = recipes.load(recipe)
    plan = loaded.plan
    progress = _Stages(key_name("prepare", Path(mix).parent.name))
    workers = plan.workers or cores()
    with _on_ray(plan.ray, workers) if plan.ray else processes(workers) as run:
        tracked = run if plan.ray else partial(_tracked, run)
        manifest = prepare(loaded.mix, CACHE, open_store(mix), progress, tracked, workers, plan.sort_mb << 20)
    _show(manifest, mix)
    return Mix(
        uri=mix,
        mix_root=manifest.root,
        held_out_root=manifest.held_out_root,
        windows=sum(source.train.windows for source in manifest.mix.sources),
    )


class Work:
    """Jobs of one stage, who carries them out and whom he tells. No dataclass, which Prefect would copy, looking for
    futures."""

    def __init__(self, stage: str, jobs: Sequence[Any], run: Run, done: Done) -> None:
        self.stage, self.jobs, self.run, self.done = stage, jobs, run, done

    def __str__(self) -> str:
        return self.stage


@task(task_run_name="{work}", cache_policy=NO_CACHE)
def carry_out(work: Work) -> None:
    """The jobs leave files, not values."""
    work.run(work.stage, work.jobs, work.done)


def _tracked(run: Run, stage: str, jobs: Sequence[Any], done: Done) -> None:
    carry_out(Work(stage, jobs, run, done))


def _nothing(job: Any) -> None:
    """Told of a job by a process that has nobody to tell."""


@contextmanager
def _on_ray(address: str, workers: int) -> Iterator[Run]:
    """The jobs of a stage as tasks of Prefect's task runner for Ray."""
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise UsageError(
            "plan.ray asks for a Ray cluster, and prefect-ray is not installed",
            next_step="pip install 'verbatim-audit-training[ray]', on every machine of the cluster too",
        ) from None
    with RayTaskRunner(address=address) as runner:
        yield partial(_shared_out, runner, SHARES * workers)


def _shared_out(runner: TaskRunner[Any], shares: int, stage: str, jobs: Sequence[Any], done: Done) -> None:
    if len(jobs) == 1:  # as by processes, a single job is the director's
        return _tracked(serially, stage, jobs, done)
    ordered = sorted(jobs, key=lambda job: -job.size)
    groups = [ordered[start::shares] for start in range(min(shares, len(ordered)))]
    futures = [runner.submit(carry_out, {"work": Work(stage, group, serially, _nothing)}) for group in groups]
    for future, group in zip(futures, groups, strict=True):
        future.result()
        for job in group:
            done(job)


class _Stages:
    """One progress for each stage, in megabytes."""

    def __init__(self, key: str) -> None:
        self._key, self._stage = key, ""
        self._progress: Progress | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._progress is None or stage != self._stage:
            self._stage = stage
            self._progress = Progress(f"Prepare: {stage}", f"{self._key}-{key_name(stage)}", -(-total // MB), "MB")
        self._progress(-(-total // MB) if done == total else done // MB)


def _show(manifest: Manifest, mix: str) -> None:
    rows = [
        {
            "source": source.name,
            "text, MB": round(source.text_bytes / 1e6, 1),
            "tokens": source.train.tokens,
            "windows": source.train.windows,
            "held-out windows": source.held_out.windows,
        }
        for source in manifest.mix.sources
    ]
    windows = sum(source.train.windows for source in manifest.mix.sources)
    facts = (f"mix root `{manifest.root}`", f"held-out root `{manifest.held_out_root}`", f"`{mix}`")
    show.result("mix-root", f"{windows:,} windows", facts)
    create_table_artifact(rows, key="mix-sources", description=f"Sources of mix {manifest.root[:16]}")


@task(task_run_name="claim an empty folder", cache_policy=NO_CACHE)
def claim_folder(recorded: str, rebuilt: str) -> None:
    """Refused unless `rebuilt` is empty or a rebuild that this code began; UsageError if `recorded` is no other mix."""
    store = open_store(rebuilt)
    if open_mix(recorded).store.uri == store.uri:
        raise UsageError(
            f"{store.uri} would be compared with itself",
            next_step="give the recorded mix with --published, another folder for the new one with --folder",
        )
    made_with.claim(store)


@task(task_run_name="compare the two mixes", cache_policy=NO_CACHE)
def compare_mixes(recorded: str, rebuilt: str) -> None:
    """Raises Divergence, naming the first source, file and window that differ, unless the two mixes are the same."""
    first, second = open_mix(recorded), open_mix(rebuilt)
    if difference := first_difference(first, second):
        raise Divergence(
            f"the rebuilt mix has root {second.manifest.root}, the recorded one {first.manifest.root}; "
            f"first difference: {difference.what}",
            cause=difference.cause,
            next_step=f"compare the manifest.json of {recorded} with that of {rebuilt}",
        )
    facts = (f"mix root `{first.manifest.root}`", f"recorded `{recorded}`", f"made anew `{rebuilt}`")
    show.result("reproduced-mix", "MATCH: the same mix", facts)
