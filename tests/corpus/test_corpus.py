"""The tester of the corpus: its short form; that its surroundings are others, and that it sees what differs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.corpus import __main__ as tester
from tests.corpus.scene import PLAIN, ROOT, Outcome, Scene, Variant

LISTED = """
import glob, json, locale, os, pathlib, sys
folder = sys.argv[1]
with os.scandir(folder) as entries:
    scanned = [entry.name for entry in entries]
found = [os.listdir(folder), scanned, [os.path.basename(path) for path in glob.glob(folder + "/*")]]
found.append([path.name for path in pathlib.Path(folder).iterdir()])
print(json.dumps([*found, locale.localeconv()["decimal_point"]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_mix_comes_out_of_any_surroundings_and_any_kills() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.corpus", "short"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" killed") >= 5 and "the same bytes" in done.stdout


def listed(folder: Path, variables: dict[str, str]) -> list[Any]:
    """What a process of a variant sees in a folder: by listdir, scandir, glob, pathlib; and its decimal sign."""
    command = [sys.executable, "-c", LISTED, str(folder)]
    done = subprocess.run(command, env=os.environ | PLAIN | variables, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_folders_list_in_an_order_that_the_seed_draws(tmp_path: Path) -> None:
    names = [f"{number:02d}" for number in range(40)]
    for name in names:
        (tmp_path / name).touch()
    plain, one, other = (listed(tmp_path, v) for v in ({}, {"CORPUS_SHUFFLE": "1"}, {"CORPUS_SHUFFLE": "2"}))
    for order, drawn, again in zip(plain[:4], one, other):
        assert sorted(order) == sorted(drawn) == sorted(again) == names
        assert len({tuple(order), tuple(drawn), tuple(again)}) == 3
    assert one[:4] == listed(tmp_path, {"CORPUS_SHUFFLE": "1"})[:4]


def test_the_locale_holds_in_all_its_parts(tmp_path: Path) -> None:
    locale = tester.turkish(tmp_path / "locale")
    if locale:  # where the system has the sources of locales
        assert listed(tmp_path, locale)[4] == ","
    assert listed(tmp_path, tester.ASCII)[4] == listed(tmp_path, {})[4] == "."


SAME = Outcome("a" * 64, {"manifest.json": "1", "tokenizer.json": "2"}, {"read": 1.0}, 1)
DIFFERENT = {
    "another root": replace(SAME, root="b" * 64),
    "another object": replace(SAME, objects=SAME.objects | {"tokenizer.json": "3"}),
    "an object more": replace(SAME, objects=SAME.objects | {"docs/a": "3"}),
    "an object less": replace(SAME, objects={"manifest.json": "1"}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_seen(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"first": SAME, "same": SAME, "other": DIFFERENT[what]}
    monkeypatch.setattr(Scene, "go", lambda self, stages: outcomes[self.variant.name])
    draw = random.Random(1)
    assert tester.go("none", tmp_path, [Variant("first"), Variant("same")], draw)
    assert not tester.go("none", tmp_path, [Variant("first"), Variant("same"), Variant("other")], draw)
    assert "NOT THE SAME" in capsys.readouterr().out
