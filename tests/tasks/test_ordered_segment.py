"""A run whose reduction is ordered, by torchrun's processes and by one that replays them: one head; and its audit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from model.spec import NumericsSpec, Ordered, Phase, ScheduleSpec
from storage import checkpoint, recipe
from storage.audit.keys import load_or_create_key
from storage.errors import UsageError
from storage.publish import publish
from storage.store import LocalStore
from tasks.process import ChildFailed
from tests.storage import small
from tests.tasks.test_segment import Trainer

ROOT = Path(__file__).resolve().parents[2]
REDUCTION = {"kind": "ordered", "replicas": 2, "shards": 2, "residual": "left_fold"}
STEPS = 5  # three of 4 units, so one micro-batch of each rank; then two of 8


def begin(folder: Path) -> None:
    schedule = ScheduleSpec(
        peak_lr="0.003",
        warmup_tokens=64,
        total_tokens=small.SEQ_LEN * 28,
        phases=(Phase(from_tokens=0, windows=4), Phase(from_tokens=small.SEQ_LEN * 12, windows=8)),
    )
    numerics = NumericsSpec(reduction=Ordered.model_validate(REDUCTION))
    small.begin(folder, LocalStore(folder / "run"), LocalStore(folder / "mix"), numerics=numerics, schedule=schedule)


def test_ranks_and_their_replay_end_in_one_head_that_one_process_audits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    one, many = (Trainer(tmp_path / name, monkeypatch) for name in ("one", "many"))
    assert many.run().ledger.header.spec["numerics"]["reduction"] == REDUCTION

    with pytest.raises(ChildFailed, match=r"processes is 2; allowed: 1 or 4 .*2 replicas × 2 shards"):
        many.train(2, STEPS)
    assert len(many.run().ledger) == 0 and not checkpoint.steps(many.store)
    many.train(4, 2)
    many.train(1, 4)
    assert many.train(4, STEPS)["head"] == one.train(1, STEPS)["head"]

    folder = tmp_path / "many"
    publish(many.store, many.mix, LocalStore(folder / "published"), load_or_create_key(folder / "keys", "trainer"))
    for step in ("1", "4"):
        command = [sys.executable, "-m", "flows.cli", "audit", str(folder / "published"), "--step", step]
        places = ["--records", str(folder / "audits"), "--keys", str(folder / "auditor")]
        done = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and f"entry {step} came out equal" in done.stdout + done.stderr, done


def test_a_recipe_that_asks_for_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    plain = yaml.safe_load(recipe.find("demo").read_text())
    plain["run"]["numerics"] = {"reduction": REDUCTION}
    for phase in plain["run"]["schedule"]["phases"]:
        phase["windows"] = 4
    for count in (1, 4, 3):
        plain["plan"]["processes"] = count
        (tmp_path / "asked.yaml").write_text(yaml.safe_dump(plain))
        if count != 3:
            assert recipe.load(tmp_path / "asked.yaml").run.numerics.reduction.kind == "ordered"
    with pytest.raises(UsageError, match=r"processes is 3; allowed: 1 or 4 .*2 replicas × 2 shards"):
        recipe.load(tmp_path / "asked.yaml")
