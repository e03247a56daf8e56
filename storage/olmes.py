"""Scores on tasks, as OLMES has them: which tasks, and the signed record of how many answers were right.

    <tasks>.yaml                         tasks: where the data lie, how a question reads, how completions are compared
    evaluations/<state>-<digest>.json    {"body": {run, step, state, tasks, scores, …}, "signature": the evaluator's}

A record holds integers and digests and no time, so that whoever evaluates again with the same key has the same bytes.
Of two formulations the better one counts, as OLMES says (arXiv 2406.08446). Its macro average is over its ten tasks;
of fewer, or of others, there is a mean alone.
Log-probabilities are sums of floats: unlike held-out losses, scores are not promised to be equal on other machines.
"""

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernels import canonical
from kernels.digest import digest
from storage import yaml_text
from storage.audit.keys import Key, verify_signature
from storage.errors import CertificateFault, InputFault, UsageError
from storage.ledger import Ledger
from storage.named import read_file
from storage.records import Count, Digest, Record, Signature, Text, first
from storage.store import Readable, Store, create_same, object_digest

PURPOSE = "evaluation"
MAX_RECORD, MAX_TASKS = 1 << 20, 1 << 20
TaskName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]
OLMES = frozenset(
    ("arc_challenge", "arc_easy", "boolq", "commonsense_qa", "hellaswag", "mmlu", "openbookqa", "piqa", "social_iqa")
) | {"winogrande"}


class Task(BaseModel):
    """Where a task's data lie and how they are asked. question, choices, answer (a number from 0) and named are
    expressions of Jinja over a row's columns; completion: how choices of different lengths are compared.

    Prompts are made of them by tasks/lm_eval_child.py, whose head says how each form reads. It evaluates expressions in
    Jinja's sandbox and takes every other text as it stands: a stranger's file of tasks executes nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: TaskName
    dataset: str  # on the Hugging Face hub; or json, with files
    subsets: list[str] = []  # whose scores are averaged; in about and files, {subset} stands for one
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")  # of a set on the hub: its commit
    files: dict[str, str] = {}  # by split, beside the file of tasks
    split: str
    examples: str  # the split of the rows that come before each question
    named: str | None = None  # a row's name there; digest(text) has 16 hex digits of the text's SHA-256
    chosen: list[str] = []  # the names of those rows, in their order; none: the split's first
    shots: int = Field(default=5, ge=0, le=64)
    limit: int | None = Field(default=None, ge=1)  # questions of a longer split, drawn as OLMES draws them
    form: Literal["question", "continuation", "blank"] = "question"
    prefix: str = "Question: "  # of the form "question"
    about: str = ""  # before the examples
    marked: bool = False  # text in brackets, as WikiHow's, is taken out
    question: str
    choices: str
    answer: str
    completion: Literal["acc", "acc_norm", "acc_mutual_info"]

    @model_validator(mode="after")
    def _from_one_place(self) -> Self:
        if self.files and self.revision:
            raise ValueError("it has files of this machine and a revision of the hub; give one of them")
        if bool(self.files) != (self.dataset == "json"):
            raise ValueError(
                f"its dataset is {self.dataset!r}: with files it is json, without it has a name on the hub"
            )
        if bool(self.chosen) != bool(self.named) or (self.chosen and len(self.chosen) < self.shots):
            raise ValueError(f"{self.shots} examples are chosen by name: give {self.shots} names and what a name is")
        if self.form == "blank" and self.completion != "acc":
            raise ValueError("of the form blank the same text is scored behind each choice: its completion is acc")
        return self


class Part(Record):
    """Right answers of so many questions of a subset, by formulation; asked: a digest of the prompts and answers of
    each; data: of the rows that the questions were made of."""

    questions: Annotated[Count, Field(ge=1)]
    right: Annotated[dict[str, Count], Field(min_length=1)]
    asked: dict[str, Digest]
    data: Digest

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.right.keys() != self.asked.keys() or max(self.right.values()) > self.questions:
            raise ValueError("more right answers than questions, or other formulations than were asked")
        return self


class Score(Record):
    """A task's, by subset; of a task without subsets there is one part, "all"."""

    parts: Annotated[dict[Text, Part], Field(min_length=1)]

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len({frozenset(part.right) for part in self.parts.values()}) > 1:
            raise ValueError("its subsets were asked in different formulations")
        return self

    @property
    def questions(self) -> int:
        """Of all subsets."""
        return sum(part.questions for part in self.parts.values())

    def shares(self) -> dict[str, Fraction]:
        """Of right answers in each formulation: the mean over subsets."""
        parts = list(self.parts.values())
        return {
            name: sum((Fraction(part.right[name], part.questions) for part in parts), Fraction(0)) / len(parts)
            for name in sorted(parts[0].right)
        }

    def share(self) -> Fraction:
        """Of the better formulation."""
        return max(self.shares().values())


class Body(Record):
    """What was evaluated and what came out. tasks: digest of the tasks as they were asked for."""

    kind: Literal["evaluation"] = "evaluation"
    run: Digest
    step: Count
    state: Digest
    tasks: Digest
    scores: Annotated[dict[TaskName, Score], Field(min_length=1)]
    packages: dict[str, Text]
    evaluator: Digest

    def mean(self) -> Fraction:
        """Of the tasks' shares."""
        return sum((score.share() for score in self.scores.values()), Fraction(0)) / len(self.scores)

    def averaged(self) -> str:
        """What mean() is: OLMES' average where all of its tasks were asked, and no other."""
        if self.scores.keys() == OLMES:
            return "the 10-task macro average"
        return f"the mean of {len(self.scores)} task{'' if len(self.scores) == 1 else 's'}"


class Evaluation(Record):
    """A body and the evaluator's signature of it."""

    body: Body
    signature: Signature


def load_tasks(path: Path) -> list[Task]:
    """The tasks of a YAML file, local files made absolute; UsageError for a bad file, InputFault for missing data."""
    like = "compare it with deployments/olmes.yaml"
    try:
        tasks = [Task.model_validate(task) for task in yaml_text.loads(read_file(path, MAX_TASKS))["tasks"]]
    except OSError as error:
        raise UsageError(
            f"the tasks {path} cannot be read: {error.strerror}",
            cause="a wrong name, or a path relative to another folder",
            next_step="give --tasks a YAML file, such as deployments/olmes.yaml",
        ) from None
    except ValidationError as error:
        raise UsageError(f"{path} holds an invalid task: {first(error)}", next_step=like) from None
    except (KeyError, TypeError):
        raise UsageError(f"{path} holds no list that is called tasks", next_step=like) from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid YAML: {str(error)[:300]}", next_step=like) from None
    if not tasks or len({task.name for task in tasks}) < len(tasks):
        raise UsageError(f"{path} must hold tasks, each with a name of its own", next_step=like)
    return [_placed(task, path.parent) for task in tasks]


def _placed(task: Task, folder: Path) -> Task:
    files = {split: str((folder / name).absolute()) for split, name in task.files.items()}
    for split, name in (
        (s, f.replace("{subset}", subset)) for s, f in files.items() for subset in task.subsets or [""]
    ):
        if not Path(name).is_file():
            raise InputFault(
                f"task {task.name}: its data for {split} are missing: there is no {name}",
                cause="the file was not fetched, or the tasks were moved without it",
                next_step="put it there, or take the task out of the file",
            )
    return task.model_copy(update={"files": files})


def tasks_digest(tasks: list[Task]) -> str:
    """Of all that is asked for, but where local files lie: of what they hold a score has its own digest."""
    named = [task.model_dump() | {"files": {s: Path(name).name for s, name in task.files.items()}} for task in tasks]
    return digest(canonical.dumps(named), "tasks")


def save(store: Store, body: Body, key: Key) -> str:
    """Sign and write the record; its key in the store."""
    data = Evaluation(body=body, signature=key.sign(body.canonical(), PURPOSE)).canonical()
    where = _key(body, data)
    create_same(store, where, data)
    return where


def _key(body: Body, data: bytes) -> str:
    return f"evaluations/{body.step:08d}-{object_digest(data)[:16]}.json"


def parse(data: bytes, where: str, ledger: Ledger) -> Body:
    """The body of a record of this run; CertificateFault for a wrong signature, run or state."""
    return check(Evaluation.parse(data, where, CertificateFault), where, ledger)


def check(record: Evaluation, where: str, ledger: Ledger) -> Body:
    """What parse() checks of a record whose bytes were parsed; its body."""
    body = record.body
    if not verify_signature(body.evaluator, record.signature, body.canonical(), PURPOSE):
        raise CertificateFault(
            f"{where}: the signature is not that of key {body.evaluator} over this content",
            cause="a byte was changed, or the content was moved to another run, state or key",
            next_step="get it again from the evaluator",
        )
    recorded = ledger.state_root(body.step) if body.step <= len(ledger) else "none"
    for what, found, expected in (("run", body.run, ledger.run_id), ("state root", body.state, recorded)):
        if found != expected:
            raise CertificateFault(
                f"{where}: its {what} is {found}, expected {expected}",
                cause="it is of another run, or of a state that this ledger does not record",
                next_step="give it beside the release of its own run",
            )
    return body


def records_in(records: Readable, ledger: Ledger, base: str = "") -> dict[str, tuple[str, Body]]:
    """Every record of this run below `base`, an evaluator's or a release's: its digest and body, by key.

    Other runs' are passed over. Raises CertificateFault for one that is forged, damaged or renamed.
    """
    found = {}
    for key in records.list(f"{base}evaluations/"):
        data = records.read(key, limit=MAX_RECORD)
        record = Evaluation.parse(data, key, CertificateFault)
        if record.body.run != ledger.run_id:
            continue
        body = check(record, key, ledger)
        if key != (due := base + _key(body, data)):
            raise CertificateFault(
                f"{key}: the name of these scores is {due}", cause="the file was renamed", next_step=f"name it {due}"
            )
        found[key] = object_digest(data), body
    return found


def scores_of(records: Readable, ledger: Ledger) -> dict[int, list[Body]]:
    """What the records of this run say, by state."""
    found: dict[int, list[Body]] = {}
    for _, body in records_in(records, ledger).values():
        found.setdefault(body.step, []).append(body)
    return found
