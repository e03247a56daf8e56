"""The child process of tasks/olmes.py: an exported model before lm-eval, in an environment that has lm-eval.

    python tasks/lm_eval_child.py REQUEST OUT     both JSON files; the request: {model: folder, tasks: [Task, …]}

It imports nothing of this project but the plain program of exports, by its file. lm-eval loads the data, makes the
prompts and decides which answers are right; what it is told of the model are log-probabilities. Of each task come out
how many answers were right in either formulation, of how many, and digests of the rows and of all that was asked:

    completion         "Question: …\\nAnswer:" goes on with each choice's own words
    multiple choice    the choices are listed behind letters, and the text goes on with each letter
"""

import hashlib
import json
import runpy
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from tokenizers import Tokenizer

PROGRAM = Path(__file__).resolve().parent.parent / "storage" / "plain_model.py"
LETTERS = "ABCDEFGHIJKLMNOP"
PACKAGES = ("lm_eval", "datasets", "torch", "tokenizers")


class Plain(TemplateLM):
    """The model as lm-eval asks it. Contexts are cut on the left to what the model can see."""

    backend = "causal"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = runpy.run_path(str(PROGRAM))["Model"].load(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @property
    def eot_token_id(self) -> int:
        return int(self.model.config["end_of_text"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return list(self.tokenizer.encode(string, add_special_tokens=False).ids)

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        return [self._one(context, continuation) for _, context, continuation in requests]

    def _one(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """(log-probability of the continuation in nats, whether each of its tokens is the likeliest)."""
        tokens = torch.tensor([*context, *continuation][-self.model.config["seq_len"] - 1 :])
        count = min(len(continuation), len(tokens) - 1)
        logits = self.model.logits(tokens[None, :-1])[0, -count:].double()
        each = logits.log_softmax(-1).gather(1, tokens[-count:, None])
        return float(each.sum()), bool((logits.argmax(-1) == tokens[-count:]).all())

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError("no task here asks for it")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("no task here asks for it")


def config(task: dict[str, Any], formulation: str) -> dict[str, Any]:
    """lm-eval's configuration of a task in one formulation."""
    question, choices = task["question"], task["choices"]
    listed = f"{{% for choice in {choices} %}} {{{{ '{LETTERS}'[loop.index0] }}}}. {{{{ choice }}}}\n{{% endfor %}}"
    completion = formulation == "completion"
    place = {"data_files": task["files"]} if task["files"] else {"revision": task["revision"]}
    return {
        "task": f"{task['name']}_{formulation}",
        "dataset_path": task["dataset"],
        "dataset_name": task["subset"],
        "dataset_kwargs": place,
        "output_type": "multiple_choice",
        "test_split": task["split"],
        "fewshot_split": task["examples"],
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": task["shots"],
        "doc_to_text": f"Question: {{{{ {question} }}}}\n{'' if completion else listed}Answer:",
        "doc_to_choice": f"{{{{ {choices} }}}}" if completion else f"{{{{ '{LETTERS}'[:({choices})|length]|list }}}}",
        "doc_to_target": f"{{{{ {task['answer']} }}}}",
        "metric_list": [{"metric": task["completion"] if completion else "acc"}],
    }


@dataclass(frozen=True)
class Scored:
    """Right answers of so many questions; digests of all prompts with their answers, and of the questions' rows."""

    right: int
    questions: int
    asked: str
    data: str


def scored(model: Plain, task: dict[str, Any], formulation: str) -> Scored:
    """A task in one formulation, asked."""
    asked, metric = config(task, formulation), task["completion"] if formulation == "completion" else "acc"
    done = simple_evaluate(model, tasks=[asked], limit=task["limit"], bootstrap_iters=0, log_samples=True)
    samples = sorted(done["samples"][asked["task"]], key=lambda sample: sample["doc_id"])
    prompts = [[sample["arguments"], sample["target"]] for sample in samples]
    right = sum(int(sample[metric]) for sample in samples)
    return Scored(right, len(samples), digest(prompts), digest([sample["doc"] for sample in samples]))


def digest(value: Any) -> str:
    """SHA-256 of it as JSON."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str).encode()).hexdigest()


def main() -> None:
    """Read the request, ask every task in both formulations, write what came out."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    model, found = Plain(Path(request["model"])), {}
    for task in request["tasks"]:
        results = {formulation: scored(model, task, formulation) for formulation in ("completion", "multiple_choice")}
        found[task["name"]] = {
            "questions": results["completion"].questions,
            "right": {name: result.right for name, result in results.items()},
            "asked": {name: result.asked for name, result in results.items()},
            "data": results["completion"].data,
        }
    document = {"scores": found, "packages": {name: version(name) for name in PACKAGES}}
    Path(sys.argv[2]).write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
