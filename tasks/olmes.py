"""Scores of an exported model on tasks, by lm-eval in an environment of its own; signed, and bound to the state."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from storage import olmes
from storage.audit.keys import load_or_create_key
from storage.errors import InputFault, Refused, VerbatimError
from storage.export import chosen_step, write_export
from storage.provenance import PROJECT
from storage.records import Record, Text, first
from storage.run import open_at
from storage.store import open_store
from tasks import leash

PYTHON = PROJECT / ".venv-olmes" / "bin" / "python"  # made by `make olmes`
CHILD = PROJECT / "tasks" / "lm_eval_child.py"
ONLINE = {"HF_HUB_OFFLINE": "0"}  # for tasks whose data come from the hub; else it asks nobody, as all of the project
UNREACHED = ("Connection", "Offline", "couldn't", "doesn't exist", "not found", "Max retries")  # in its last line
TAIL = 4096  # bytes of what the child wrote to standard error, whose last line is told


class Answer(Record):
    """What the child writes."""

    scores: dict[olmes.TaskName, olmes.Score]
    packages: dict[str, Text]


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
        scores=done.scores,
        packages=done.packages,
        evaluator=key.public,
    )
    kept = f"{records}/{olmes.save(open_store(records), body, key)}"
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


def _run(python: Path, folder: Path, tasks: list[olmes.Task]) -> Answer:
    """What lm-eval says of the export in `folder`, in which the request and its result lie too."""
    given, out = folder / "request.json", folder / "out.json"
    given.write_text(json.dumps({"model": str(folder), "tasks": [task.model_dump() for task in tasks]}), "utf-8")
    env = {} if all(task.files for task in tasks) else ONLINE
    with tempfile.TemporaryFile() as errors:
        child = leash.start_script(python, CHILD, [str(given), str(out)], errors, env)
        try:
            status = child.wait()
        finally:  # also where a person cancels
            leash.stop(child)
        if status or not out.exists():
            raise _failed(_last_line(errors), tasks)
    try:
        return Answer.model_validate_json(out.read_bytes())
    except ValidationError as error:
        raise VerbatimError(f"lm-eval gave no scores: {first(error)}", cause="a split without rows") from None


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - TAIL))
    return errors.read().decode(errors="replace").rstrip().rpartition("\n")[2] or "it said nothing"


def _failed(last: str, tasks: list[olmes.Task]) -> VerbatimError:
    remote = [task.dataset for task in tasks if not task.files]
    if remote and any(word in last for word in UNREACHED):
        return InputFault(
            f"the data of {', '.join(remote)} could not be had: {last}",
            cause="there is no network, or the hub has no such data set at this commit",
            next_step="try again with a network; what was fetched once is kept",
        )
    return VerbatimError(f"lm-eval failed: {last}", next_step="make olmes, then evaluate again")
