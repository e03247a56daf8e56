"""Scores of an exported model on tasks, by lm-eval in an environment of its own; signed, and bound to the state."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from storage import olmes
from storage.audit.keys import load_or_create_key
from storage.errors import InputFault, Refused, VerbatimError
from storage.export import chosen_step, write_export
from storage.provenance import PROJECT
from storage.run import open_at
from storage.store import open_store

PYTHON = PROJECT / ".venv-olmes" / "bin" / "python"  # made by `make olmes`
CHILD = PROJECT / "tasks" / "lm_eval_child.py"


def evaluate(
    address: str, tasks: Path, records: str, keys: str, step: int | None = None, python: Path = PYTHON
) -> dict[str, Any]:
    """Ask a checkpoint of a run, published or not, these tasks; the last one for None. Returns the record, the average
    and where the record now lies.

    Every weight is verified against the ledger before it is exported. Raises Refused where lm-eval's environment or the
    checkpoint is missing, InputFault for missing data or another tokenizer, CheckpointFault for a checkpoint whose root
    is not in the ledger, VerbatimError where lm-eval failed.
    """
    asked, run = ready(tasks, python), open_at(address)
    chosen = chosen_step(run, step)
    with tempfile.TemporaryDirectory() as folder:
        write_export(run, chosen, Path(folder))
        done = _run(python, Path(folder), asked)
    key = load_or_create_key(Path(keys), "auditor")
    body = olmes.Body(
        run=run.ledger.run_id,
        step=chosen,
        state=run.ledger.state_root(chosen),
        tasks=olmes.tasks_digest(asked),
        scores={name: olmes.Score(**score) for name, score in done["tasks"].items()},
        packages=done["packages"],
        evaluator=key.public,
    )
    kept = str(Path(records) / olmes.save(open_store(records), body, key))
    return body.document() | {"record": kept, "macro": float(body.macro())}


def ready(tasks: Path, python: Path = PYTHON) -> list[olmes.Task]:
    """The tasks, if they can be asked here; Refused where lm-eval's environment is missing, and what load_tasks()
    raises."""
    asked = olmes.load_tasks(tasks)
    if not python.exists():
        raise Refused(f"lm-eval's environment is not installed: there is no {python}", next_step="make olmes")
    return asked


def is_scored(address: str, tasks: Path, step: int, records: str) -> bool:
    """Whether these records hold scores of the state on the same tasks."""
    known = olmes.scores_of(open_store(records), open_at(address).ledger).get(step, ())
    return olmes.tasks_digest(olmes.load_tasks(tasks)) in [body.tasks for body in known]


def _run(python: Path, folder: Path, tasks: list[olmes.Task]) -> dict[str, Any]:
    """What lm-eval says of the export in `folder`, in which the request and its result lie too."""
    given, out = folder / "request.json", folder / "out.json"
    given.write_text(json.dumps({"model": str(folder), "tasks": [task.model_dump() for task in tasks]}), "utf-8")
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-I", str(CHILD), str(given), str(out)]
    child = subprocess.run(command, env=plain, capture_output=True, text=True, errors="replace")
    if child.returncode or not out.exists():
        raise _failed(child.stderr.rstrip().rpartition("\n")[2] or "it said nothing", tasks)
    return dict(json.loads(out.read_text(encoding="utf-8")))


def _failed(last: str, tasks: list[olmes.Task]) -> VerbatimError:
    remote = [task.dataset for task in tasks if not task.files]
    if remote and any(word in last for word in ("Connection", "Offline", "couldn't", "not found", "Max retries")):
        return InputFault(
            f"the data of {', '.join(remote)} could not be had: {last}",
            cause="there is no network, or the hub has no such data set",
            next_step="try again with a network; what was fetched once is kept",
        )
    return VerbatimError(f"lm-eval failed: {last}", next_step="make olmes, then evaluate again")
