"""Tasks of evaluating: held-out losses checked, tasks asked, each shown as an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import olmes, show
from tasks.audit import audited_by
from tasks.device import turn
from tasks.progress import Progress
from tasks.references import KEYS, Audited, Scored, key_name


@task(task_run_name="check the held-out losses", cache_policy=NO_CACHE)
def check_held_out(published: str, step: int | None, backend: str, records: str) -> Audited:
    """Measure the held-out losses of a published checkpoint again, the last one for None. Raises AuditFailed unless
    they are those that were recorded."""
    request = {"store": published, "step": step, "backend": backend, "records": records, "keys": str(KEYS)}
    return audited_by("tasks.evaluation", "held-out losses", request)


@task(task_run_name="ask tasks", cache_policy=NO_CACHE)
def score(run: str, tasks: str, step: int | None, records: str) -> Scored:
    """Ask a checkpoint of a run, published or not, a file of tasks, by lm-eval; the last one for None."""
    progress = Progress("Ask tasks", key_name("ask tasks", Path(run).name), 1, "answers")

    def tell(done: int, of: int, task: str) -> None:
        progress.total = of
        progress(done, task)

    with turn("cpu"):  # where lm-eval computes
        done = olmes.evaluate(run, Path(tasks), records, str(KEYS), step, tell)
    show.result(
        key_name("scores", f"state {done['step']}"),
        f"State {done['step']}: {done['mean']:.1%} of answers right, {done['averaged']}",
        (f"state root `{done['state']}`", f"signed by `{done['evaluator']}`", f"record `{done['record']}`"),
        "| task | questions | completion | multiple choice |\n|---|--:|--:|--:|\n"
        + "".join(_row(name, found) for name, found in done["by_task"].items()),
    )
    return Scored(**{name: done[name] for name in ("step", "state", "mean", "averaged", "record")})


def _row(name: str, found: dict[str, Any]) -> str:
    shares = (found["shares"].get(form) for form in ("completion", "multiple_choice"))
    told = " | ".join("" if share is None else f"{share:.1%}" for share in shares)
    return f"| {name} | {found['questions']:,} | {told} |\n"
