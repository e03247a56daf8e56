"""Task of auditing: one step in a process of its own, its verdict shown first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from storage.errors import VerbatimError
from tasks import process, show
from tasks.device import turn
from tasks.process import Event
from tasks.progress import Progress
from tasks.references import KEYS, Audited, key_name

LONGEST = 2000  # characters of a detail that are shown and handed on; the log has it all
SHOWN = 20  # bad copies in the artifact; the flow run's log has them all


class AuditFailed(VerbatimError):
    """An audit whose verdict is not a match; carries its exit code."""

    def __init__(self, result: Event) -> None:
        self.exit_code = int(result["exit_code"])
        super().__init__(
            f"{result['piece']}: {result['verdict']}: {result['detail']}",
            cause=str(result["explanation"]),
            next_step=str(result["next"]),
        )


def _name() -> str:
    step = task_run.parameters["step"]
    return "audit the initial state" if step is None else f"audit step {step}"


@task(task_run_name=_name, cache_policy=NO_CACHE)
def audit_step(
    store: str, step: int | None, backend: str, records: str, draw: str = "", mirrors: Sequence[str] = ()
) -> Audited:
    """Replay one step, or regenerate the initial state (step None). Raises AuditFailed unless it matches.

    mirrors: further copies of the release, for what is bad in `store`.
    """
    given = {"store": store, "mirrors": list(mirrors), "step": step, "draw": draw, "backend": backend}
    piece = "initial" if step is None else f"step {step}"
    return audited_by("tasks.replay", piece, given | {"records": records, "keys": str(KEYS)})


def audited_by(module: str, piece: str, request: dict[str, Any]) -> Audited:
    """Have a child process audit a piece of the release request["store"] by request["backend"]; its progress and its
    verdict are shown. Raises AuditFailed unless it matches."""
    progress = Progress(f"Audit {piece}", key_name("audit", piece), 1, "steps")

    def report(event: Event) -> None:
        if event["kind"] == "stage" and event["of"]:
            progress.total = event["of"]
            progress(event["done"], event["stage"])

    with turn(request["backend"]):
        result = process.run(module, request, report, log=get_run_logger().info)
    progress(progress.total, str(result["verdict"]).upper())
    _show(request["store"], result)
    if result["exit_code"]:
        raise AuditFailed(result)
    wanted = ("piece", "step", "verdict", "exit_code", "detail", "seconds", "certificate")
    return Audited(**{name: result[name] for name in wanted}, bad_copies=len(result["bad_copies"]))


def _show(store: str, result: Event) -> None:
    bad = [f"bad copy in `{copy['store']}`: `{copy['key']}`: {copy['wrong']}" for copy in result["bad_copies"]]
    for line in bad:
        get_run_logger().warning(line)
    show.result(
        key_name("verdict", str(result["piece"])),
        f"{str(result['verdict']).upper()} {result['piece']}",
        (
            str(result["detail"])[:LONGEST],
            str(result["explanation"]),
            f"next: {result['next']}",
            f"certificate: `{result['certificate']}`",
            show.link(store),
            *bad[:SHOWN],
        ),
    )
