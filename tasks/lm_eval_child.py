"""The child process of tasks/olmes.py: an exported model before lm-eval, in an environment that has lm-eval.

    python tasks/lm_eval_child.py REQUEST OUT     both JSON files; the request: {model: folder, tasks: [Task, …]}

It imports nothing of this project but the plain program of exports, by its file. lm-eval loads the data, puts questions
behind examples and decides which answers are right; what it is told of the model are log-probabilities. Of each subset
of each task come out how many answers were right in either formulation, of how many, and digests of the rows and of all
that was asked. How a row reads, by the task's form:

    form            completion                                 multiple choice
    question        "Question: …\\nAnswer:" + each choice       "Question: …\\n A. …\\n B. …\\nAnswer:" + each letter
    continuation    the text + each choice                     the text, "Choose the best continuation:", as above
    blank           the text to its "_", each choice in it,    "Fill in the blank: …", as above
                    + the rest of the text, which is scored

Standard output has a line of JSON now and then: {"done": answers scored so far, "of": all, "task": its name}.
"""

import hashlib
import json
import os
import random
import re
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, load_dataset
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from tokenizers import Tokenizer

PROGRAM = Path(__file__).resolve().parent.parent / "storage" / "plain_model.py"
LETTERS = "ABCDEFGHIJKLMNOP"
PACKAGES = ("lm_eval", "datasets", "torch", "tokenizers")
SEED = 1234  # by which OLMES takes its 1000 questions of a longer split
UNCONDITIONED = "Answer:"  # what OLMES puts before a choice whose own likelihood is asked; lm-eval puts nothing
EVERY = 0.5  # seconds between two lines about how far it is
Row = dict[str, Any]


def digest(value: Any) -> str:
    """SHA-256 of it as JSON."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str).encode()).hexdigest()


# A file of tasks may be a stranger's: its expressions reach nothing but a row.
EXPRESSIONS = SandboxedEnvironment(undefined=StrictUndefined)
EXPRESSIONS.globals["digest"] = lambda text: hashlib.sha256(text.encode()).hexdigest()[:16]


class Plain(TemplateLM):
    """The model as lm-eval asks it. Contexts are cut on the left to what the model can see; what two requests in a row
    begin with is computed once."""

    backend = "causal"

    def __init__(self, folder: Path, tell: Callable[[], None]) -> None:
        super().__init__()
        self.model = runpy.run_path(str(PROGRAM))["Model"].load(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tell, self._seen, self._cache = tell, list[int](), dict[str, Any]()

    @property
    def eot_token_id(self) -> int:
        return int(self.model.config["end_of_text"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return list(self.tokenizer.encode(string, add_special_tokens=False).ids)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = (request.args for request in requests)
        return self._loglikelihood_tokens(
            [((before, after), *self._encode_pair(before or UNCONDITIONED, after)) for before, after in pairs]
        )

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        return [self._one(context, continuation) for _, context, continuation in requests]

    def _one(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """(log-probability of the continuation in nats, whether each of its tokens is the likeliest)."""
        tokens = [*context, *continuation][-self.model.config["seq_len"] - 1 :]
        count = min(len(continuation), len(tokens) - 1)
        logits, target = self._last(tokens[:-1], count).double(), torch.tensor(tokens[-count:])
        nats = logits.log_softmax(-1).gather(1, target[:, None]).sum()
        self._tell()
        return float(nats), bool((logits.argmax(-1) == target).all())

    def _last(self, tokens: list[int], count: int) -> torch.Tensor:
        """float32[count, vocabulary]: the logits behind each of the last tokens."""
        same = next((i for i, pair in enumerate(zip(self._seen, tokens)) if pair[0] != pair[1]), len(tokens))
        kept = min(same, len(self._seen), len(tokens) - count)
        self._cache = {name: (k[:, :, :kept], v[:, :, :kept]) for name, (k, v) in self._cache.items() if kept}
        self._seen = tokens
        found: torch.Tensor = self.model.logits(torch.tensor([tokens[kept:]]), self._cache)[0, -count:]
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no task here asks for it")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("no task here asks for it")


def unmarked(text: str) -> str:
    """Without the marks in brackets that texts from WikiHow have in HellaSwag; a title begins a sentence."""
    return re.sub(r"\[.*?\]", "", re.sub(r"\.? \[title\]", ". ", text.strip())).replace("  ", " ")


def literal(text: str) -> str:
    """A template that renders as the text itself: lm-eval renders descriptions by Jinja, outside any sandbox."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


@dataclass(frozen=True)
class Form:
    """How rows of a task read in one formulation: what lm-eval calls with each."""

    task: Row
    completion: bool

    @cached_property
    def said(self) -> dict[str, Callable[..., Any]]:
        """The task's expressions as functions of a row."""
        names = ("question", "choices", "answer")
        return {name: EXPRESSIONS.compile_expression(self.task[name], undefined_to_none=False) for name in names}

    @property
    def fills(self) -> bool:
        """Whether the choices stand in what comes before, and the rest of the text is scored."""
        return self.completion and self.task["form"] == "blank"

    def text(self, row: Row) -> str | int:
        """What comes before the choices; or the right one's number, where each choice has a text of its own."""
        if self.fills:
            return self.number(row)
        question, form = str(self.said["question"](row)), self.task["form"]
        if self.completion:
            return self._clean(question if form == "continuation" else f"{self.task['prefix']}{question}\nAnswer:")
        question = question.replace("_", "___") if form == "blank" else question
        ahead = {"continuation": "", "blank": "Fill in the blank: "}.get(form, self.task["prefix"])
        between = "Choose the best continuation:\n" if form == "continuation" else ""
        listed = "".join(f" {letter}. {choice}\n" for letter, choice in zip(LETTERS, self.said["choices"](row)))
        return self._clean(f"{ahead}{question}\n{between}{listed}Answer:")

    def choices(self, row: Row) -> list[str]:
        """The answers, each with the space before it, which counts where their lengths do; or the texts before."""
        offered = [str(choice) for choice in self.said["choices"](row)]
        if len(offered) > len(LETTERS):
            sys.exit(f"task {self.task['name']}: a row offers {len(offered)} choices, {len(LETTERS)} have letters")
        if self.fills:
            return [self.said["question"](row).partition("_")[0] + choice for choice in offered]
        return [f" {self._clean(choice)}" for choice in offered] if self.completion else self._letters(len(offered))

    def target(self, row: Row) -> str | int:
        """The right answer's number; or the text that is scored behind each choice."""
        return f" {self.said['question'](row).partition('_')[2].strip()}" if self.fills else self.number(row)

    def number(self, row: Row) -> int:
        """Of the right choice, from 0."""
        return int(self.said["answer"](row))

    def _clean(self, text: str) -> str:
        return unmarked(text) if self.task["marked"] else text

    @staticmethod
    def _letters(count: int) -> list[str]:
        return [f" {letter}" for letter in LETTERS[:count]]


@dataclass(frozen=True)
class Asked:
    """One subset of a task: its data, and what is taken of them."""

    task: Row
    subset: str
    data: DatasetDict

    @classmethod
    def load(cls, task: Row, subset: str) -> "Asked":
        """From files or the hub."""
        if task["files"]:
            files = {split: name.replace("{subset}", subset) for split, name in task["files"].items()}
            return cls(task, subset, load_dataset(task["dataset"], data_files=files))
        return cls(task, subset, load_dataset(task["dataset"], subset or None, revision=task["revision"]))

    def questions(self, rows: Dataset) -> Dataset:
        """All rows, or as many as the limit says, drawn as OLMES draws them."""
        limit = self.task["limit"]
        if limit is None or limit >= len(rows):
            return rows
        return rows.select(sorted(random.Random(SEED).sample(range(len(rows)), limit)))

    def examples(self, rows: Dataset) -> list[Row]:
        """The rows that come before each question: those that are named, else all, of which the first are taken."""
        if not self.task["chosen"]:
            return list(rows)
        name = EXPRESSIONS.compile_expression(self.task["named"], undefined_to_none=False)
        found: dict[str, Row] = {}
        for row in rows:
            found.setdefault(str(name(row)), row)
        missing = [wanted for wanted in self.task["chosen"] if wanted not in found]
        if missing:
            sys.exit(f"task {self.task['name']}: no row of {self.task['examples']} is named {missing[0]}")
        return [found[wanted] for wanted in self.task["chosen"]]

    def answers(self) -> int:
        """How many log-probabilities both formulations ask for."""
        form, twice = Form(self.task, True), self.task["completion"] == "acc_mutual_info"
        rows = self.questions(self.data[self.task["split"]])
        return sum(len(form.said["choices"](row)) for row in rows) * (3 if twice else 2)

    def config(self, completion: bool) -> Row:
        """lm-eval's configuration. It copies all of it, objects that have a method too, but no functions."""
        task, form = self.task, Form(self.task, completion)
        return {
            "task": f"{task['name']}_{self.subset}_{'completion' if completion else 'letters'}",
            "custom_dataset": lambda **options: self.data,
            "output_type": "multiple_choice",
            "test_split": task["split"],
            "process_docs": lambda rows: self.questions(rows),
            "fewshot_split": task["examples"],
            "fewshot_config": {"sampler": "first_n", "process_docs": lambda rows: self.examples(rows)},
            "num_fewshot": task["shots"],
            "description": literal(task["about"].replace("{subset}", self.subset.replace("_", " "))),
            "target_delimiter": "",
            "doc_to_text": lambda row: form.text(row),
            "doc_to_choice": lambda row: form.choices(row),
            "doc_to_target": lambda row: form.target(row),
            "metric_list": [{"metric": task["completion"] if completion else "acc"}],
        }

    def scored(self, model: Plain) -> Row:
        """Asked in both formulations."""
        right, asked, data = {}, {}, ""
        for name in ("completion", "multiple_choice"):
            given, metric = (
                self.config(name == "completion"),
                self.task["completion"] if name == "completion" else "acc",
            )
            done = simple_evaluate(model, tasks=[given], bootstrap_iters=0, log_samples=True)
            samples = sorted(done["samples"][given["task"]], key=lambda sample: sample["doc_id"])
            right[name] = sum(int(sample[metric]) for sample in samples)
            asked[name] = digest([[sample["arguments"], sample["target"]] for sample in samples])
            data = digest([sample["doc"] for sample in samples])
        return {"questions": len(samples), "right": right, "asked": asked, "data": data}


def telling(report: int, total: int, task: Callable[[], str]) -> Iterator[None]:
    """Count answers, one by each next(), and say now and then how far it is, to the open file `report`."""
    last = 0.0
    for done in range(1, total + 1):
        yield
        if done == total or time.monotonic() - last >= EVERY:
            last = time.monotonic()
            os.write(report, json.dumps({"done": done, "of": total, "task": task()}).encode() + b"\n")
    while True:
        yield


def main() -> None:
    """Read the request, load all data, ask every task in both formulations, write what came out."""
    report = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no report
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    every = [Asked.load(task, subset) for task in request["tasks"] for subset in task["subsets"] or [""]]
    for asked in every:  # a name that no row has is told before hours of asking
        asked.examples(asked.data[asked.task["examples"]])
    now, scores = "", dict[str, Row]()
    told = telling(report, sum(asked.answers() for asked in every), lambda: now)
    next(told)
    model = Plain(Path(request["model"]), lambda: next(told))
    for asked in every:
        now = asked.task["name"]
        scores.setdefault(now, {"parts": {}})["parts"][asked.subset or "all"] = asked.scored(model)
    document = {"scores": scores, "packages": {name: version(name) for name in PACKAGES}}
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
