"""Scores on tasks: lm-eval's own, in its environment, against a computation that shares only the model with it.

The tiny tasks beside this file go through the loader that fetches tasks' data from the hub.
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import Environment
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from model.spec import ModelSpec
from storage import olmes
from storage.checkpoint import checkpoint_key
from storage.errors import CertificateFault, CheckpointFault, InputFault, Refused, UsageError, VerbatimError
from storage.ledger import Ledger
from storage.plain_model import Model
from storage.provenance import PROJECT
from storage.store import LocalStore
from tasks.olmes import PYTHON, evaluate
from tests.storage.conftest import Small, flip
from tests.tasks.test_process import gone, wait_for

ONE = "name: a, split: test, examples: test, question: q, choices: c, answer: '0', completion: acc"  # of tasks
TINY = Path(__file__).parent / "tiny_tasks" / "tasks.yaml"
RESULT: dict[str, Any] = {
    "scores": {
        "colours": {
            "questions": 7,
            "right": {"completion": 3, "multiple_choice": 4},
            "asked": {"completion": "1" * 64, "multiple_choice": "2" * 64},
            "data": "3" * 64,
        }
    },
    "packages": {"lm_eval": "0"},
}


def canned(folder: Path, result: dict[str, Any] | None = None, said: str = "") -> Path:
    """A python that answers as lm-eval's would."""
    path = folder / "python"
    answer = json.dumps(result or RESULT)
    ending = f"echo '{said}' >&2; exit 1" if said else f"cat > \"$5\" <<'END'\n{answer}\nEND"
    path.write_text(f"#!/bin/sh\n{ending}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def scored(made: Small, python: Path, tasks: Path = TINY) -> dict[str, Any]:
    folder = made.folder.as_posix()
    return evaluate(folder, tasks, f"{folder}/records", f"{folder}/keys", python=python)


def test_a_record_is_signed_and_bound_to_the_state_and_comes_out_the_same(made: Small, tmp_path: Path) -> None:
    first = scored(made, canned(tmp_path))
    path, ledger = Path(first["record"]), Ledger(made.published)
    before = path.read_bytes()
    assert scored(made, canned(tmp_path))["record"] == first["record"] and path.read_bytes() == before
    body = olmes.parse(before, "record", ledger)
    assert (body.run, body.step, body.state) == (ledger.run_id, 12, ledger.state_root(12))
    assert body.macro() == body.scores["colours"].share() == olmes.Fraction(4, 7)
    assert olmes.scores_of(LocalStore(made.folder / "records"), ledger) == {12: [body]}
    flip(path, before.index(b'"completion":3') + len('"completion":'))
    with pytest.raises(CertificateFault, match="the signature is not that of key"):
        olmes.parse(path.read_bytes(), "record", ledger)


def test_missing_data_a_wrong_tokenizer_and_a_root_of_no_ledger_are_one_error_each(made: Small, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"lm-eval's environment is not installed(.|\n)*make olmes"):
        scored(made, tmp_path / "nowhere")
    shutil.copy(TINY, tmp_path / "alone.yaml")
    with pytest.raises(InputFault, match=r"task colours: its data for test are missing: there is no .*colours\.jsonl"):
        scored(made, canned(tmp_path), tmp_path / "alone.yaml")
    flip(made.mix.path("tokenizer.json"), 40)
    with pytest.raises(InputFault, match=r"tokenizer.json has digest \w{64}, the model was trained with \w{64}"):
        scored(made, canned(tmp_path))
    manifest = made.store.path(checkpoint_key(12))
    document = json.loads(manifest.read_bytes())
    document["scalars"]["updates"] -= 1
    manifest.write_bytes(json.dumps(document, separators=(",", ":")).encode())
    with pytest.raises(CheckpointFault, match=r"give root \w{64}, the ledger records \w{64}"):
        scored(made, canned(tmp_path))


def test_what_lm_eval_says_at_its_end_is_told(made: Small, tmp_path: Path) -> None:
    with pytest.raises(VerbatimError, match="lm-eval failed: KeyError: no such column"):
        scored(made, canned(tmp_path, said="KeyError: no such column"))
    remote = tmp_path / "remote.yaml"
    one = {"name": "a", "dataset": "allenai/ai2_arc", "split": "test", "examples": "train", "completion": "acc"}
    remote.write_text(json.dumps({"tasks": [one | {"question": "q", "choices": "c", "answer": "a"}]}), encoding="utf-8")
    with pytest.raises(InputFault, match="the data of allenai/ai2_arc could not be had: ConnectionError: no route"):
        scored(made, canned(tmp_path, said="ConnectionError: no route"), remote)


@pytest.mark.parametrize(
    "change",
    [{"questions": 0}, {"right": {}}, {"right": {"completion": 8, "multiple_choice": 4}}, {"right": {"completion": 3}}],
    ids=str,
)
def test_a_score_that_cannot_be_is_none(made: Small, tmp_path: Path, change: dict[str, Any]) -> None:
    score = RESULT["scores"]["colours"] | change
    with pytest.raises(VerbatimError, match=r"lm-eval gave no scores: scores\.colours"):
        scored(made, canned(tmp_path, RESULT | {"scores": {"colours": score}}))


def test_nothing_of_lm_eval_outlives_who_asked(made: Small, tmp_path: Path) -> None:
    """Killed, he cannot cancel anything."""
    python, pid = tmp_path / "python", tmp_path / "pid"
    sleeper = tmp_path / "sleeper.py"
    sleeper.write_text(
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(100)\n", encoding="utf-8"
    )
    # Takes the place of the script, keeps the leash: -I leash.py SCRIPT …
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "$2" "{sleeper}"\n', encoding="utf-8")
    python.chmod(0o755)
    asks = "import sys\nfrom pathlib import Path\nfrom tasks.olmes import evaluate\n"
    asks += "run, tasks, python = sys.argv[1:]\n"
    asks += "evaluate(run, Path(tasks), f'{run}/records', f'{run}/keys', python=Path(python))\n"
    parent = subprocess.Popen([sys.executable, "-c", asks, made.folder, TINY, python], cwd=PROJECT)
    child = wait_for(pid, 60)
    parent.kill()
    parent.wait()
    assert gone(child)


@pytest.mark.parametrize(
    "text",
    [
        "tasks: []",
        "nothing",
        "tasks: [{name: a}]",
        "{",
        f"tasks: [{{{ONE}, dataset: json, files: {{test: a.jsonl}}, revision: {'1' * 40}}}]",
        f"tasks: [{{{ONE}, dataset: a/b, revision: main}}]",
    ],
    ids=str,
)
def test_what_is_no_file_of_tasks(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"tasks\.yaml"):
        olmes.load_tasks(path)


def test_the_tasks_that_are_published_can_be_asked() -> None:
    tasks = {task.name: task for task in olmes.load_tasks(PROJECT / "deployments" / "olmes.yaml")}
    assert len(tasks) == 7 and [name for name, task in tasks.items() if not task.revision] == ["social_iqa"]
    asked = Environment().compile_expression(tasks["boolq"].question)(passage="Ice floats.", question="does ice sink")
    assert asked == "Ice floats.\nQuestion: does ice sink?"


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of lm-eval's environment, which is made where `make olmes` did not make it."""
    if PYTHON.exists():
        return PYTHON
    python = tmp_path_factory.mktemp("olmes") / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-r", PROJECT / "deployments" / "olmes.txt"], check=True)
    return python


@pytest.fixture
def export(made: Small, tmp_path: Path) -> Path:
    """A model of random weights that sees 256 tokens, exported, with the small mix's tokenizer."""
    shape = ModelSpec(
        vocab=300, d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, seq_len=256, window=64, full_every=2
    )
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(size, generator=generator).numpy() for name, size in shape.shapes().items()}
    tmp_path.joinpath("export").mkdir()
    save_file(weights, tmp_path / "export" / "model.safetensors")
    config = json.loads(made.published.read("export/config.json")) | shape.model_dump()
    config |= {"attention_windows": [64, 256], "norm_eps": 1e-5}
    (tmp_path / "export" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shutil.copy(made.published.path("export/tokenizer.json"), tmp_path / "export")
    return tmp_path / "export"


def ran(python: Path, export: Path, out: Path) -> dict[str, Any]:
    """What the child says of the tiny tasks."""
    request = out.with_suffix(".request")
    tasks = [task.model_dump() for task in olmes.load_tasks(TINY)]
    request.write_text(json.dumps({"model": str(export), "tasks": tasks}), encoding="utf-8")
    subprocess.run([python, "-I", PROJECT / "tasks" / "lm_eval_child.py", request, out], check=True)
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def rows(name: str) -> list[tuple[str, list[str], int]]:
    """(question, choices, number of the right one) of a tiny task, read by hand."""
    lines = [json.loads(line) for line in (TINY.parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    if name == "colours":
        return [(r["stem"], r["options"]["text"], r["options"]["label"].index(r["key"])) for r in lines]
    if name == "sums":
        return [(f"{r['a']} + {r['b']} =", r["offered"], 1) for r in lines]
    return [(f"{r['text']} Is that so?", ["yes", "no"], 0 if r["holds"] else 1) for r in lines]


class ByHand:
    """The same scores from the model's logits alone."""

    def __init__(self, export: Path) -> None:
        self.model = Model.load(export)
        self.tokenizer = Tokenizer.from_file(str(export / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def nats(self, before: str, after: str) -> float:
        """Log-probability of the tokens that `after` adds; of a text that begins, after an end of text."""
        first = self.ids(before) or [self.model.config["end_of_text"]]
        tokens = (self.ids(before + after) if before else first + self.ids(after))[-257:]
        added = len(tokens) - len(first) if before else len(tokens) - 1
        with torch.inference_mode():
            p = self.model.logits(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        return math.fsum(float(p[i - 1, tokens[i]]) for i in range(len(tokens) - added, len(tokens)))

    def right(self, name: str, form: str, shots: int, limit: int) -> int:
        data, letters = rows(name), form == "multiple_choice"

        def prompt(question: str, choices: list[str]) -> str:
            listed = "".join(f" {letter}. {choice}\n" for letter, choice in zip("ABCD", choices)) if letters else ""
            return f"Question: {question}\n{listed}Answer:"

        def named(choices: list[str]) -> list[str]:
            return list("ABCD"[: len(choices)]) if letters else choices

        count = 0
        for question, choices, answer in data[:limit]:
            examples = [row for row in data if row[0] != question][:shots]
            before = "".join(f"{prompt(q, c)} {named(c)[a]}\n\n" for q, c, a in examples) + prompt(question, choices)
            each = [self.nats(before, f" {choice}") for choice in named(choices)]
            if not letters and name == "colours":
                each = [nats / len(choice) for nats, choice in zip(each, choices)]
            if not letters and name == "claims":
                each = [nats - self.nats("", f" {choice}") for nats, choice in zip(each, choices)]
            count += each.index(max(each)) == answer
        return count


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing lm-eval on a busy machine
def test_lm_evals_scores_are_those_computed_by_hand_and_come_out_again(
    lm_eval: Path, export: Path, tmp_path: Path
) -> None:
    first = ran(lm_eval, export, tmp_path / "first.json")
    assert ran(lm_eval, export, tmp_path / "second.json") == first
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    hand = ByHand(export)
    for name, shots, limit in (("colours", 2, 7), ("sums", 0, 7), ("claims", 1, 6)):
        expected = {form: hand.right(name, form, shots, limit) for form in ("completion", "multiple_choice")}
        assert (first["scores"][name]["right"], first["scores"][name]["questions"]) == (expected, limit)
