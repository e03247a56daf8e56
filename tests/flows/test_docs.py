"""`verbatim docs` as a person types it: each question, as text and as JSON, and what is wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.docs import lines
from storage.publish import publish
from storage.run import open_run
from storage.store import LocalStore
from storage.stream import Stream
from storage.training import train_segment
from tests.flows.conftest import result, verbatim
from tests.storage import small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run of 12 steps, 28 windows; its copy in published/ ends after 9 steps."""
    folder = tmp_path_factory.mktemp("docs")
    store, mix = LocalStore(folder / "run"), LocalStore(folder / "mix")
    with small.stand_in():
        _, key = small.begin(folder, store, mix)
        train_segment(open_run(store, Stream.open(mix)), "cpu", 9, checkpoint_every=5, diagnostics_every=4)
        publish(store, mix, LocalStore(folder / "published"), key)
        train_segment(open_run(store, Stream.open(mix)), "cpu", None, checkpoint_every=5, diagnostics_every=4)
    return folder


def test_from_a_step_to_its_documents_and_back(run: Path) -> None:
    answer = result("docs", run, "--step", "10")
    assert (answer["run"]["name"], answer["run"]["recorded"]) == ("small", 12)
    assert [(window["window"], window["step"]) for window in answer["windows"]] == [(22, 10), (23, 10), (24, 10)]
    assert all(sum(piece["tokens"] for piece in window["pieces"]) == 17 for window in answer["windows"])
    for document in answer["documents"][:2]:
        (read,) = result("docs", run, "--doc", document["id"])["documents"]
        assert read["seen"] == document["seen"] and 10 in {seen["step"] for seen in read["seen"]}
        text = (run / "sources" / document["file"]).read_text().splitlines()[document["position"]]
        assert read["text"] == json.loads(text)["text"]


def test_what_a_person_is_shown(run: Path) -> None:
    shown = verbatim("docs", run, "--step", "10").stdout
    assert "run small (12 steps done): 3 windows, " in shown and "window 22, step 10: window " in shown
    held = verbatim("docs", run / "published", "--window", "22").stdout
    assert "not seen by any step yet; to come in step 10" in held and "run small (9 steps done)" in held
    assert "in window 22" in verbatim("docs", run / "mix", "--window", "22").stdout


def test_a_search_finds_text_and_its_steps(run: Path) -> None:
    answer = result("docs", run / "published", "--search", "verbs7 ")
    assert {document["source"] for document in answer["documents"]} == {"verbs"}
    assert all("verbs7 " in document["excerpt"] for document in answer["documents"])
    texts = [json.loads(line)["text"] for line in (run / "sources" / "verbs.jsonl").read_text().splitlines()]
    positions = {document["position"] for document in answer["documents"]}
    assert positions == {position for position, text in enumerate(texts) if "verbs7 " in text}
    assert "held out: in no step's windows" in verbatim("docs", run, "--doc", "nouns/held_out/0").stdout
    shown = verbatim("docs", run, "--search", "nouns").stdout
    assert "documents more: --json lists all" in shown and "tokens, 3 matches" in shown
    assert "tokens, 1 match\n" in verbatim("docs", run, "--search", "verbs7 ").stdout
    assert "0 documents" in verbatim("docs", run, "--search", "adverbs").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --step NUMBER, --window NUMBER, --doc ID, --search TEXT"),
        (("--step", "1", "--window", "1"), "give one of --step NUMBER"),
        (("--step", "-1"), "--step"),
        (("--step", "12"), "step 12 is outside run 'small': its 12 steps are 0 to 11"),
        (("--window", "28"), "run 'small' reads windows 0 to 27"),
        (("--doc", "verbs/train/\x1b[31m"), r"no document 'verbs/train/\x1b[31m'"),
    ],
)
def test_wrong_questions(run: Path, arguments: tuple[str, ...], said: str) -> None:
    shown = verbatim("docs", run, *arguments, expect=2).stderr
    assert said in shown and "\x1b[31m" not in shown


def test_a_documents_lines_are_kept_and_its_tail_is_told() -> None:
    document = {"id": "a/train/0", "part": "train", "file": "f", "member": "", "position": 0, "tokens": 3, "seen": []}
    answer = {"run": None, "windows": [], "mix_root": "0", "documents": [document | {"text": "x\n\ny", "missing": 2}]}
    assert list(lines(answer))[1:] == [
        "a/train/0 f 0: 3 tokens, the last 2 in no window",
        "    in no window of the first pass",
        "    | x\n    | \n    | y",
    ]
