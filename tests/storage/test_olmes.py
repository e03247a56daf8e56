"""Scores on tasks: lm-eval's own, in its environment, against a computation that shares only the model with it.

The tiny tasks beside this file go through the loader that fetches tasks' data from the hub.
"""

import json
import math
import random
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from jinja2 import Environment
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from flows import checks, evaluations
from flows.coverage import report, report_lines
from model.spec import ModelSpec
from storage import olmes
from storage.audit.release import check_release
from storage.checkpoint import checkpoint_key
from storage.errors import CertificateFault, CheckpointFault, InputFault, Refused, UsageError, VerbatimError
from storage.figures import load_probe
from storage.ledger import Ledger
from storage.plain_model import Model
from storage.provenance import PROJECT
from storage.publish import publish
from storage.store import LocalStore
from tasks import olmes as asking
from tasks.olmes import PYTHON, evaluate
from tests.storage.conftest import Small, flip
from tests.tasks.test_process import gone, wait_for

ONE = "name: a, split: test, examples: test, question: q, choices: c, answer: '0', completion: acc"  # of tasks
TINY = Path(__file__).parent / "tiny_tasks" / "tasks.yaml"
RESULT: dict[str, Any] = {
    "scores": {
        "colours": {
            "parts": {
                "all": {
                    "questions": 7,
                    "right": {"completion": 3, "multiple_choice": 4},
                    "asked": {"completion": "1" * 64, "multiple_choice": "2" * 64},
                    "data": "3" * 64,
                }
            }
        }
    },
    "packages": {"lm_eval": "0"},
}


def scores(*parts: tuple[int, int, int]) -> olmes.Score:
    """Of subsets with so many questions and right answers of each formulation."""
    each = RESULT["scores"]["colours"]["parts"]["all"]
    found = [each | {"questions": n, "right": {"completion": c, "multiple_choice": m}} for n, c, m in parts]
    return olmes.Score.model_validate({"parts": {str(i): part for i, part in enumerate(found)}})


def canned(folder: Path, result: dict[str, Any] | None = None, said: str = "") -> Path:
    """A python that answers as lm-eval's would."""
    path = folder / "python"
    answer = json.dumps(result or RESULT)
    told = """echo '{"done": 2, "of": 4, "task": "colours"}'\n"""
    ending = f"echo '{said}' >&2; exit 1" if said else f"{told}cat > \"$5\" <<'END'\n{answer}\nEND"
    path.write_text(f"#!/bin/sh\n{ending}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def scored(made: Small, python: Path, tasks: Path = TINY) -> dict[str, Any]:
    folder = made.folder.as_posix()
    with mock.patch.object(asking, "PYTHON", python):
        return evaluate(folder, tasks, f"{folder}/records", f"{folder}/keys")


def test_whoever_asks_is_told_how_far_it_is(made: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, told = made.folder.as_posix(), list[tuple[int, int, str]]()
    monkeypatch.setattr(asking, "PYTHON", canned(tmp_path))
    evaluate(folder, TINY, f"{folder}/records", f"{folder}/keys", None, lambda *far: told.append(far))
    assert told == [(2, 4, "colours")]


def test_a_person_sees_how_far_it_is_beside_the_scores(capsys: pytest.CaptureFixture[str]) -> None:
    with evaluations.asking(quiet=False) as tell:
        tell(1, 4, "colours")
        tell(4, 4, "sums")
    said = capsys.readouterr()
    assert not said.out and "Ask tasks: 4 of 4 answers; sums" in said.err
    with evaluations.asking(quiet=True) as tell:
        tell(4, 4, "sums")
    assert capsys.readouterr() == ("", "")


def test_of_subsets_there_is_one_mean_and_the_macro_is_of_all_ten_tasks_alone(made: Small, tmp_path: Path) -> None:
    one = scores((4, 1, 2), (10, 9, 0))
    assert one.shares() == {"completion": Fraction(23, 40), "multiple_choice": Fraction(1, 4)}
    assert (one.share(), one.questions) == (Fraction(23, 40), 14)
    known = olmes.parse(Path(scored(made, canned(tmp_path))["record"]).read_bytes(), "record", Ledger(made.published))
    assert known.averaged() == "the mean of 1 task"
    ten = dict.fromkeys(olmes.OLMES, scores((4, 3, 2)))
    assert known.model_copy(update={"scores": ten}).averaged() == "the 10-task macro average"
    others = ten | {"mmlu": one}
    assert known.model_copy(update={"scores": others}).mean() == (9 * Fraction(3, 4) + Fraction(23, 40)) / 10
    del others["boolq"]
    assert known.model_copy(update={"scores": others}).averaged() == "the mean of 9 tasks"


def test_a_record_is_signed_and_bound_to_the_state_and_comes_out_the_same(made: Small, tmp_path: Path) -> None:
    first = scored(made, canned(tmp_path))
    path, ledger = Path(first["record"]), Ledger(made.published)
    before = path.read_bytes()
    assert scored(made, canned(tmp_path))["record"] == first["record"] and path.read_bytes() == before
    body = olmes.parse(before, "record", ledger)
    assert (body.run, body.step, body.state) == (ledger.run_id, 12, ledger.state_root(12))
    assert body.mean() == body.scores["colours"].share() == Fraction(4, 7)
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


def test_scores_are_published_found_later_and_shown_with_state_and_signer(made: Small, tmp_path: Path) -> None:
    done, records = scored(made, canned(tmp_path)), LocalStore(made.folder / "records")
    (key,) = records.list()
    later, whole = made.published, LocalStore(tmp_path / "whole")
    assert publish(made.store, made.mix, later, made.key, records).copied == 1
    body = publish(made.store, made.mix, whole, made.key, records).release
    assert body.classes["evaluations"].objects.keys() == {f"audits/{key}"} and check_release(whole).body == body
    said = {line["what"]: line["says"] for line in checks.release([later.uri])}
    assert said["later evaluations"] == "1, none listed, each proven"
    named, page = tmp_path / "named.txt", tmp_path / "page.html"
    named.write_text(f"{done['evaluator']} Ada\n", encoding="utf-8")
    found = report(later.uri, [], named, page)
    assert [(each["step"], each["by"], each["averaged"]) for each in found["scores"]] == [
        (12, "Ada", "the mean of 1 task")
    ]
    assert "scores of state 12, by Ada: 57.1%, the mean of 1 task: colours 57.1%" in list(report_lines(found))
    (genuine,) = checks.records([later.uri], [records.path(key)])
    assert genuine["says"].startswith(f"scores of state 12, by key {done['evaluator']}: 57.1%, the mean of 1 task")
    state, shown = Ledger(later).state_root(12), page.read_text(encoding="utf-8")
    row = shown[shown.index("<h3>Scores on tasks</h3>") :].partition("</table>")[0]
    assert state[:16] in row and "colours 57.1%" in row and "Ada" in row
    assert (
        "Scores on tasks" in whole.read("index.html").decode()
        and done["evaluator"][:16] in whole.read("index.html").decode()
    )
    flip(later.path(f"audits/{key}"), 300)
    with pytest.raises(CertificateFault):
        check_release(later)
    assert not report(later.uri, [], named)["scores"] and f"audits/{key}" in str(report(later.uri, [], named)["faulty"])


def test_held_out_losses_of_each_source_are_shown_with_the_state(made: Small) -> None:
    ledger, page = Ledger(made.published), made.published.read("index.html").decode()
    part = page[page.index("<h3>Held-out losses</h3>") :].partition("</table>")[0]
    for step in (0, 5, 10, 12):
        probe = load_probe(made.published, ledger, step)
        assert ledger.state_root(step)[:16] in part
        for name, loss in probe.sources.items():
            assert f"<bdi>{name}</bdi>" in part and f"{loss.value():.3f}" in part
    assert 'aria-label="Held-out loss by source: nats a token' in part


@pytest.mark.parametrize(
    "change",
    [{"questions": 0}, {"right": {}}, {"right": {"completion": 8, "multiple_choice": 4}}, {"right": {"completion": 3}}],
    ids=str,
)
def test_a_score_that_cannot_be_is_none(made: Small, tmp_path: Path, change: dict[str, Any]) -> None:
    part = RESULT["scores"]["colours"]["parts"]["all"] | change
    with pytest.raises(VerbatimError, match=r"lm-eval gave no scores: scores\.colours\.parts"):
        scored(made, canned(tmp_path, RESULT | {"scores": {"colours": {"parts": {"all": part}}}}))


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
    asks = "import sys\nfrom pathlib import Path\nfrom tasks import olmes\n"
    asks += "run, tasks, python = sys.argv[1:]\nolmes.PYTHON = Path(python)\n"
    asks += "olmes.evaluate(run, Path(tasks), f'{run}/records', f'{run}/keys')\n"
    parent = subprocess.Popen([sys.executable, "-c", asks, made.folder, TINY, python], cwd=PROJECT)
    child = wait_for(pid, 60)
    parent.kill()
    parent.wait()
    assert gone(child)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tasks: []", "must hold tasks"),
        ("nothing", "no list that is called tasks"),
        ("{}", "no list that is called tasks"),
        ("tasks: [{name: a}]", "dataset: Field required"),
        ("{", "is not valid YAML"),
        ("tasks: [{name: a, name: b}]", "given twice: name"),
        ("tasks: [&a {}, *a]", "aliases are not allowed"),
        (f"tasks: [{{{ONE}, dataset: json, files: {{test: a.jsonl}}, revision: {'a' * 40}}}]", "a revision of the hub"),
        (f"tasks: [{{{ONE}, dataset: csv, files: {{test: a.csv}}}}]", "'csv': with files it is json"),
        (f"tasks: [{{{ONE}, dataset: json}}]", "without it has a name on the hub"),
        (f"tasks: [{{{ONE}, dataset: a/b, revision: main}}]", "revision: String should match"),
        (f"tasks: [{{{ONE}, dataset: a/b, shots: 2, named: id, chosen: [x]}}]", "give 2 names"),
        (f"tasks: [{{{ONE}, dataset: a/b, chosen: [x, y, z, u, v]}}]", "and what a name is"),
        (f"tasks: [{{{ONE.replace('completion: acc', 'completion: acc_norm')}, dataset: a/b, form: blank}}]", "is acc"),
    ],
    ids=str,
)
def test_what_is_no_file_of_tasks(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "tasks.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"tasks\.yaml .*{why}"):
        olmes.load_tasks(path)


def test_the_tasks_that_are_published_can_be_asked() -> None:
    tasks = {task.name: task for task in olmes.load_tasks(PROJECT / "deployments" / "olmes.yaml")}
    assert tasks.keys() == olmes.OLMES and all(task.revision for task in tasks.values())
    assert [name for name, task in tasks.items() if not task.chosen] == ["mmlu"] and len(tasks["mmlu"].subsets) == 57
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
    command = [python, "-I", PROJECT / "tasks" / "lm_eval_child.py", request, out]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert (far := json.loads(told[-1]))["done"] == far["of"] > len(told)
    found: dict[str, Any] = json.loads(out.read_bytes())
    return found


def rows(name: str) -> list[tuple[str, list[str], int]]:
    """(question, choices, number of the right one) of a tiny task, read by hand."""
    lines = [json.loads(line) for line in (TINY.parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    if name == "colours":
        return [(r["stem"], r["options"]["text"], r["options"]["label"].index(r["key"])) for r in lines]
    if name == "sums":
        return [(f"{r['a']} + {r['b']} =", r["offered"], 1) for r in lines]
    if name == "endings":
        return [(f"{r['topic']}: {r['first']} {r['then'].capitalize()}", r["ends"], int(r["right"])) for r in lines]
    if name == "blanks":
        return [(r["said"], [r["one"], r["two"]], int(r["which"]) - 1) for r in lines]
    if name.startswith("facts"):
        return [(r["asked"], r["offered"], r["right"]) for r in lines]
    return [(f"{r['text']} Is that so?", ["yes", "no"], 0 if r["holds"] else 1) for r in lines]


# Of the questions of endings, which have marks in brackets: how they read, with choices listed and without.
CLEANED = {
    "Home: [header] How to boil an egg [title] Heat the water. [step] Wait until it boils. ": (
        "Home: How to boil an egg. Heat the water. Wait until it boils.",
        "Home: How to boil an egg. Heat the water. Wait until it boils. \nChoose the best continuation:\n"
        " A. Put the egg in. Wait again.\n B. Read a book about eggs.\n C. Sell the pan.\n D. Sing to the water.\n"
        "Answer:",
        [" Put the egg in. Wait again.", " Read a book about eggs.", "Sell the pan.", "Sing to the water."],
    ),
    "Garden: [header] How to plant a tree [title] Dig a hole [step] It should be deep. ": (
        "Garden: How to plant a tree. Dig a hole It should be deep.",
        "Garden: How to plant a tree. Dig a hole It should be deep. \nChoose the best continuation:\n"
        " A. Fill it with cake.\n B. Fall in.\n C. Measure the moon. Dig.\n D. Put the tree in. Water it.\nAnswer:",
        [" Fill it with cake.", "Fall in.", " Measure the moon. Dig.", " Put the tree in. Water it."],
    ),
}


class Asked(NamedTuple):
    """How a tiny task is asked. examples: by their rows; limit: of questions."""

    examples: list[int]
    limit: int = 1000
    about: str = ""


TASKS = {
    "colours": Asked([0, 1]),
    "sums": Asked([]),
    "claims": Asked([0], 6),
    "endings": Asked([1, 0]),
    "blanks": Asked([5], 4),
    "facts_of_numbers": Asked([0], about='Here are questions of numbers. {{ 1 / 0 }}, "so" said.\n\n'),
    "facts_of_animals": Asked([0], about='Here are questions of animals. {{ 1 / 0 }}, "so" said.\n\n'),
}


class ByHand:
    """The same scores from the model's logits alone."""

    def __init__(self, export: Path) -> None:
        self.model = Model.load(export)
        self.tokenizer = Tokenizer.from_file(str(export / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def nats(self, before: str, after: str) -> float:
        """Log-probability of the tokens that `after` adds; spaces at the end of `before` are its own."""
        spaces = before[len(before.rstrip()) :]
        first, whole = self.ids(before.rstrip()), self.ids(before.rstrip() + spaces + after)
        added, tokens = len(whole) - len(first), whole[-257:]
        with torch.inference_mode():
            p = self.model.logits(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        return math.fsum(float(p[i - 1, tokens[i]]) for i in range(len(tokens) - added, len(tokens)))

    def pairs(self, name: str, row: tuple[str, list[str], int], letters: bool) -> list[tuple[str, str]]:
        """What comes before each choice, and the choice; or, of a blank, what comes behind it."""
        question, choices, _ = row
        listed = "".join(f" {letter}. {choice}\n" for letter, choice in zip("ABCD", choices))
        named = [f" {letter}" for letter in "ABCD"[: len(choices)]]
        if name == "endings":
            plain, lettered = question.rstrip(), f"{question}\nChoose the best continuation:\n{listed}Answer:"
            plain, lettered, choices = CLEANED.get(question, (plain, lettered, choices))
            return [(lettered, letter) for letter in named] if letters else [(plain, f" {end}") for end in choices]
        if name == "blanks" and not letters:
            before, after = question.split("_")
            return [(before + choice, after) for choice in choices]
        lead = "Fill in the blank: " if name == "blanks" else "Question: "
        prompt = f"{lead}{question.replace('_', '___')}\n{listed if letters else ''}Answer:"
        return [(prompt, choice) for choice in (named if letters else [f" {choice}" for choice in choices])]

    def right(self, name: str, letters: bool) -> int:
        data, asked, count = rows(name), TASKS[name], 0
        numbers = range(len(data))
        if asked.limit < len(data):
            numbers = random.Random(1234).sample(numbers, asked.limit)
        for row in (data[number] for number in numbers):
            chosen = [data[i] for i in asked.examples]
            if name in (
                "colours",
                "claims",
                "facts_of_numbers",
                "facts_of_animals",
            ):  # the first but the question's own
                chosen = [other for other in data if other != row][: len(chosen)]
            shown = ["".join(self.pairs(name, example, letters)[example[2]]) for example in chosen]
            each = []
            for before, after in self.pairs(name, row, letters):
                nats = self.nats(asked.about + "".join(f"{text}\n\n" for text in shown) + before, after)
                if not letters and name in ("colours", "endings", "facts_of_numbers", "facts_of_animals"):
                    nats /= len(after)
                if not letters and name == "claims":
                    nats -= self.nats("Answer:", after)
                each.append(nats)
            count += each.index(max(each)) == row[2]
        return count


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installing lm-eval on a busy machine
def test_lm_evals_scores_are_those_computed_by_hand_and_come_out_again(
    lm_eval: Path, export: Path, tmp_path: Path
) -> None:
    first = ran(lm_eval, export, tmp_path / "first.json")
    assert ran(lm_eval, export, tmp_path / "second.json") == first
    assert (tmp_path / "first.json").read_bytes() == (tmp_path / "second.json").read_bytes()
    hand, found = ByHand(export), first["scores"]
    assert found.keys() == {"colours", "sums", "claims", "endings", "blanks", "facts"}
    assert found["facts"]["parts"].keys() == {"of_numbers", "of_animals"}
    for name, asked in TASKS.items():
        task, _, subset = name.partition("_")
        part = found[task]["parts"][subset or "all"]
        expected = {"completion": hand.right(name, letters=False), "multiple_choice": hand.right(name, letters=True)}
        assert (name, part["right"], part["questions"]) == (name, expected, min(len(rows(name)), asked.limit))
