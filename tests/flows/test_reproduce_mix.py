"""`verbatim reproduce-mix`: the same mix made anew, or what differs first, against a published copy or one's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from storage.corpus import made_with
from storage.corpus.manifest import KEY
from storage.store import open_store
from storage.stream import Stream
from tests.flows import tiny
from tests.flows.conftest import verbatim


@pytest.fixture(scope="module")
def prepared(api: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(recipe, folder) of a mix that lies there."""
    folder = tmp_path_factory.mktemp("prepared")
    recipe = tiny.recipe(folder / "recipe")
    verbatim("prepare", recipe, "--folder", folder)
    return recipe, folder


def test_the_same_mix_from_an_empty_folder(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, folder = prepared
    root = Stream.open(open_store(str(folder / "mix"))).manifest.root
    shown = verbatim("reproduce-mix", recipe, "--folder", folder).stdout
    assert "the same mix: " in shown and root in shown
    assert (folder / "rebuilt-mix" / KEY).read_bytes() == (folder / "mix" / KEY).read_bytes()
    (tmp_path / "published").mkdir()
    shutil.copy(folder / "mix" / KEY, tmp_path / "published" / KEY)
    alone = verbatim("reproduce-mix", recipe, "--published", tmp_path / "published", "--folder", folder).stdout
    assert root in alone


def test_another_mix_ends_with_10_and_names_what_differs(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, folder = prepared
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text(encoding="utf-8").replace("held_out_windows: 16", "held_out_windows: 15"))
    said = verbatim("reproduce-mix", other, "--published", folder, "--folder", tmp_path, expect=10).stderr
    assert "first difference: spec.held_out_windows: 16 and 15" in said and "another recipe" in said


def test_parts_of_another_version_are_not_taken_up(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, folder = prepared
    shutil.copytree(folder / "mix", tmp_path / "rebuilt-mix")
    said = tmp_path / "rebuilt-mix" / made_with.KEY
    said.write_bytes(said.read_bytes().replace(b'"unicode":"', b'"unicode":"1'))
    shown = verbatim("reproduce-mix", recipe, "--published", folder, "--folder", tmp_path, expect=13).stderr
    assert "was made with unicode 1" in shown and "taken up here, not made anew" in shown


def test_a_mix_is_not_compared_with_itself(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(prepared[1] / "mix", tmp_path / "rebuilt-mix")
    itself = ("--published", tmp_path / "rebuilt-mix", "--folder", tmp_path)
    assert "compared with itself" in verbatim("reproduce-mix", prepared[0], *itself, expect=2).stderr


def test_nothing_to_compare_with_is_told_before_any_work(prepared: tuple[Path, Path], tmp_path: Path) -> None:
    shown = verbatim("reproduce-mix", prepared[0], "--folder", tmp_path, expect=2).stderr
    assert "holds no mix" in shown and not (tmp_path / "rebuilt-mix").exists()
