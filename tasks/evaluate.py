"""Tasks of evaluating: held-out losses checked, tasks asked, each shown as an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks import olmes, process
from tasks.audit import concluded
from tasks.device import turn
from tasks.references import KEYS, Audited, Scored, key_name


@task(task_run_name="check the held-out losses", cache_policy=NO_CACHE)
def check_held_out(published: str, step: int | None, backend: str, records: str) -> Audited:
    """Measure the held-out losses of a published checkpoint again, the last one for None. Raises AuditFailed unless
    they are those that were recorded."""
    request = {"store": published, "step": step, "backend": backend, "records": records, "keys": str(KEYS)}
    with turn(backend):
        result = process.run("tasks.evaluation", request, log=get_run_logger().info)
    return concluded(published, result)


@task(task_run_name="ask tasks", cache_policy=NO_CACHE)
def score(run: str, tasks: str, step: int | None, records: str) -> Scored:
    """Ask a checkpoint of a run, published or not, a file of tasks, by lm-eval; the last one for None."""
    with turn("cpu"):  # where lm-eval computes
        done = olmes.evaluate(run, Path(tasks), records, str(KEYS), step)
    create_table_artifact(
        [_row(name, found) for name, found in done["scores"].items()],
        key=key_name("scores", f"state {done['step']}"),
        description=f"Right answers of state {done['step']}: {done['macro']:.1%} on average, the better formulation",
    )
    return Scored(step=done["step"], state=done["state"], macro=done["macro"], record=done["record"])


def _row(name: str, found: dict[str, Any]) -> dict[str, Any]:
    shares = {form.replace("_", " "): f"{right / found['questions']:.1%}" for form, right in found["right"].items()}
    return {"task": name, "questions": found["questions"], **shares}
