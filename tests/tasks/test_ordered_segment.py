"""A run whose reduction is ordered, by torchrun's processes and by one that replays them: one head; and its audit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from model.group import Alone
from model.spec import NumericsSpec, Ordered, Phase, ScheduleSpec
from storage import recipe
from storage.audit.keys import load_or_create_key
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.errors import Refused, UsageError
from storage.publish import publish
from storage.run import open_run
from storage.store import LocalStore
from storage.stream import Stream
from storage.team import Team
from storage.training import train_segment
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


def alone(made: Trainer, until: int) -> None:
    train_segment(made.run(), "cpu", until, checkpoint_every=4, diagnostics_every=4)


@pytest.mark.slow
def test_ranks_and_their_replay_end_in_one_head_that_one_process_audits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    one, many = (Trainer(tmp_path / name, monkeypatch) for name in ("one", "many"))
    assert many.run().ledger.header.spec["numerics"]["reduction"] == REDUCTION
    many.train(4, 2)
    alone(many, 4)
    many.train(4, STEPS)
    alone(one, STEPS)
    assert many.run().ledger.head == one.run().ledger.head

    folder = tmp_path / "many"
    key, published = load_or_create_key(folder / "keys", "trainer"), LocalStore(folder / "published")
    publish(many.store, many.mix, published, key)
    assert audit_step(published, 1, "cpu", key).outcome is Outcome.MATCH
    command = [sys.executable, "-m", "flows.cli", "audit", str(published.root), "--step", "4"]
    places = ["--records", str(folder / "audits"), "--keys", str(folder / "auditor")]
    done = subprocess.run([*command, *places], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "entry 4 came out equal" in done.stdout + done.stderr, done


def test_another_number_of_processes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    begin(tmp_path)
    store, team = LocalStore(tmp_path / "run"), Team()
    team.group = Alone()
    team.group.size = 2
    run, before = open_run(store, Stream.open(LocalStore(tmp_path / "mix"))), store.list()
    with pytest.raises(Refused, match=r"processes is 2; allowed: 1 or 4 .*2 replicas × 2 shards"):
        train_segment(run, "cpu", checkpoint_every=4, diagnostics_every=4, team=team)
    assert store.list() == before


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
