"""Pieces of a preparation: whose they are, who removes them, and rows out of large ones."""

import fcntl
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.corpus.manifest import KEY
from storage.corpus.parts import Parts
from storage.corpus.prepare import prepare
from storage.corpus.read import taken
from storage.errors import Refused
from tests.storage.corpus.mixes import small
from tests.storage.corpus.test_prepare import store


def test_a_claim_on_what_another_process_has_just_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opened the lock while the other had it; the lock it gets now keeps nobody away."""
    spec, target = small(tmp_path), store()

    def late(file: int, how: int) -> None:
        shutil.rmtree(next(tmp_path.glob("parts-*")))

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(Refused, match="or has just finished it"):
        prepare(spec, tmp_path, target)


def test_what_a_finished_call_had_no_time_to_remove_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, target = small(tmp_path), store()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Parts, "remove", interrupt)
        prepare(spec, tmp_path, target)
    assert KEY in target.list() and list(tmp_path.glob("parts-*"))
    prepare(spec, tmp_path, target)
    assert not list(tmp_path.glob("parts-*"))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_rows_are_taken_out_of_more_text_than_one_array_holds() -> None:
    """A file of a data set may hold 4 GiB of text; to join its batches first is an error of Arrow's from 2 GiB on."""
    batch = pa.table({"text": ["x" * (8 << 20), "y"]})
    table = pa.concat_tables([batch] * 300)
    assert table.nbytes > 2**31
    found = taken(table, np.array([1, 300, 599]))["text"]
    assert [text[:2] for text in found.to_pylist()] == ["y", "xx", "y"] and len(found[1].as_py()) == 8 << 20
    assert taken(table, np.empty(0, np.int64)).num_rows == 0
