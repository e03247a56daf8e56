"""A recipe: one YAML file that says everything a run needs, checked before anything starts.

    mix:   which text, how it is cut into windows          -> MixSpec, digested into the mix root
    run:   the model, its arithmetic, optimizer, schedule  -> RunSpec, digested into the ledger's header
    plan:  when to checkpoint, where segments end          -> Plan, in no digest: it changes no bit of any state

A field that is unknown is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from model import schedule
from model.spec import RunSpec
from storage import yaml_text
from storage.corpus.spec import MixSpec, TrainTokenizer
from storage.errors import UsageError, without_secrets
from storage.named import read_file
from storage.provenance import PROJECT

MAX_RECIPE = 1 << 20
RECIPES = PROJECT / "deployments" / "recipes"


class Plan(BaseModel):
    """How a run is carried out. Steps count from 0; "every k" means after k, 2k, 3k, ... steps, and at the end."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    checkpoint_every: int = Field(ge=1)
    diagnostics_every: int = Field(default=10, ge=1)
    segment_ends: tuple[int, ...] = Field(default=(), strict=False)
    score_every: int = Field(default=0, ge=0)  # of the checkpoints every n-th is asked the tasks; 0: none is
    tasks: str = ""  # file of these tasks, in the project's folder or anywhere
    processes: int = Field(default=1, ge=1, le=1024)  # that share each step, on one machine
    workers: int = Field(default=0, ge=0, le=1024)  # processes that prepare the mix; 0: one for each core
    sort_mb: int = Field(default=512, ge=16, le=1 << 20)  # memory that each of them may sort in
    ray: str | None = None  # address of a Ray cluster that prepares the mix instead; its machines share this folder

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if list(self.segment_ends) != sorted(set(self.segment_ends)) or any(end < 1 for end in self.segment_ends):
            raise ValueError(f"segment_ends is {list(self.segment_ends)}; allowed: increasing step numbers from 1")
        if bool(self.score_every) != bool(self.tasks):
            raise ValueError(f"score_every is {self.score_every} and tasks {self.tasks!r}; give both, or neither")
        return self


class Recipe(BaseModel):
    """The three parts of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mix: MixSpec
    run: RunSpec
    plan: Plan

    @model_validator(mode="after")
    def _fit(self) -> Self:
        model, tokenizer = self.run.model, self.mix.tokenizer
        if self.mix.seq_len != model.seq_len:
            raise ValueError(f"mix.seq_len is {self.mix.seq_len}, run.model.seq_len {model.seq_len}; they must agree")
        if isinstance(tokenizer, TrainTokenizer) and tokenizer.vocab > model.vocab:
            raise ValueError(f"mix.tokenizer.vocab is {tokenizer.vocab}; run.model.vocab allows {model.vocab}")
        self.run.numerics.reduction.check_processes(self.plan.processes)
        return self

    @property
    def steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return schedule.total_steps(self.run)

    def stops(self) -> list[int]:
        """The step counts at which a segment ends: those planned, those to be scored, then the end of the run."""
        ends = {*self.plan.segment_ends, *self.scored()}
        return [end for end in sorted(ends) if end < self.steps] + [self.steps]

    def scored(self) -> list[int]:
        """The step counts after which the tasks are asked."""
        every = self.plan.score_every * self.plan.checkpoint_every
        return list(range(every, self.steps + 1, every)) if every else []


def find(name: str | Path) -> Path:
    """`demo` is deployments/recipes/demo.yaml; anything with a folder or a suffix is a path."""
    path = Path(name)
    return RECIPES / f"{name}.yaml" if path.name == str(name) and not path.suffix else path


def load(name: str | Path) -> Recipe:
    """Read and check a recipe. Raises UsageError that names the file, the field, the value and what is allowed."""
    path = find(name)
    try:
        data = read_file(path, MAX_RECIPE)
    except OSError as error:
        raise UsageError(
            f"the recipe {path} cannot be read: {error.strerror}",
            cause="a wrong name, or a path relative to another folder",
            next_step=f"use one of {', '.join(sorted(known.stem for known in RECIPES.glob('*.yaml')))}, or a path",
        ) from None
    try:
        return Recipe.model_validate(yaml_text.loads(data))
    except ValidationError as error:
        raise UsageError(_explain(path, error), next_step="compare it with deployments/recipes/demo.yaml") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid YAML: {error}", cause="indentation or a missing quote") from None


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"{path} is not a valid recipe:"]
    for fault in error.errors():
        field = ".".join(str(part) for part in fault["loc"]) or "recipe"
        given = "" if fault["type"] == "missing" else f" (given: {_shown(fault['input'])!r})"
        lines.append(f"  {field}: {fault['msg'].removeprefix('Value error, ')}{given}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    """The beginning of what a recipe says there."""
    return without_secrets(str(value))[:80]
