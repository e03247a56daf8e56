"""Scores of an exported model on tasks, by lm-eval in an environment of its own; signed, and bound to the state."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
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


Tell = Callable[[int, int, str], None]  # answers that were scored, of how many, and the task that is asked now


class Answer(Record):
    """What the child writes."""

    scores: dict[olmes.TaskName, olmes.Score]
    packages: dict[str, Text]


def evaluate(
    address: str,
    tasks: Path,
    records: str,
    keys: str,
    step: int | None = None,
    tell: Tell = lambda done, of, task: None,
) -> dict[str, Any]:
    """Ask a checkpoint of a run, published or not, these tasks; the last one for None. Returns the record, the average,
    what it is of, each task's shares, and where the record now lies.

    Every weight is verified against the ledger before it is exported. Raises Refused where lm-eval's environment or the
    checkpoint is missing, InputFault for missing data or another tokenizer, CheckpointFault for a checkpoint whose root
    is not in the ledger, VerbatimError where lm-eval failed.
    """
    asked, run = ready(tasks), open_at(address)
    chosen = chosen_step(run, step)
    with tempfile.TemporaryDirectory() as folder:
        write_export(run, chosen, Path(folder))
        done = _run(Path(folder), asked, tell)
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
    return body.document() | shown(body) | {"record": kept}


def shown(body: olmes.Body) -> dict[str, Any]:
    """What people are told of a record: {mean, averaged: what the mean is, by_task: name → {questions, shares}}."""
    tasks = {
        name: {"questions": score.questions, "shares": {form: float(s) for form, s in score.shares().items()}}
        for name, score in body.scores.items()
    }
    return {"mean": float(body.mean()), "averaged": body.averaged(), "by_task": tasks}


def ready(tasks: Path) -> list[olmes.Task]:
    """The tasks, if they can be asked here; Refused where lm-eval's environment is missing, and what load_tasks()
    raises."""
    asked = olmes.load_tasks(tasks)
    if not PYTHON.exists():
        raise Refused(f"lm-eval's environment is not installed: there is no {PYTHON}", next_step="make olmes")
    return asked


def is_scored(address: str, tasks: Path, step: int, records: str) -> bool:
    """Whether these records hold scores of the state on the same tasks."""
    known = olmes.scores_of(open_store(records), open_at(address).ledger).get(step, ())
    return olmes.tasks_digest(olmes.load_tasks(tasks)) in [body.tasks for body in known]


def _run(folder: Path, tasks: list[olmes.Task], tell: Tell) -> Answer:
    """What lm-eval says of the export in `folder`, in which the request and its result lie too."""
    given, out = folder / "request.json", folder / "out.json"
    given.write_text(json.dumps({"model": str(folder), "tasks": [task.model_dump() for task in tasks]}), "utf-8")
    env = {} if all(task.files for task in tasks) else ONLINE
    with tempfile.TemporaryFile() as errors:
        child = leash.start_script(PYTHON, CHILD, [str(given), str(out)], subprocess.PIPE, errors, env)
        try:
            _listen(child, tell)
            status = child.wait()
        finally:  # also where a person cancels
            leash.stop(child)
        if status or not out.exists():
            raise _failed(_last_line(errors), tasks)
    try:
        return Answer.model_validate_json(out.read_bytes())
    except ValidationError as error:
        raise VerbatimError(f"lm-eval gave no scores: {first(error)}", cause="a split without rows") from None


def _listen(child: subprocess.Popen[bytes], tell: Tell) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            if line.endswith(b"\n"):  # else it was killed in the middle
                far = json.loads(line)
                tell(far["done"], far["of"], far["task"])


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
