"""A flow whose segments are several processes goes on after the death of any, and ends where one process would."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import yaml

from flows.processes import family
from storage.account import account
from storage.ledger import part_key
from storage.segment import SegmentStart
from storage.store import open_store
from tests.flows.conftest import ROOT, command


def kill_rank_after(run: Path, step: int, root: int, rank: int, killed: list[int]) -> threading.Thread:
    """Kill one rank of the segment below `root` once the ledger holds the entry of `step`."""

    def strike() -> None:
        limit = time.monotonic() + 200
        while not (run / part_key(step)).exists() and time.monotonic() < limit:
            time.sleep(0.01)
        living = [process for process in family(root) if "tasks.segment" in process.command]
        launchers = {process.pid for process in living if "torch.distributed.run" in process.command}
        ranks = sorted(process.pid for process in living if process.parent in launchers)
        os.kill(ranks[rank], signal.SIGKILL)
        killed.append(ranks[rank])

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_flow_goes_on_after_ranks_are_killed(folder: Path, recipe: Path, tmp_path: Path) -> None:
    plan, killed = yaml.safe_load(recipe.read_text(encoding="utf-8")), list[int]()
    plan["plan"]["processes"] = 2
    together = tmp_path / "together.yaml"
    together.write_text(yaml.safe_dump(plan), encoding="utf-8")
    (tmp_path / "mix").symlink_to(folder / "mix")
    arguments = command("train", together, "--folder", tmp_path, "--backend", "reference")
    train = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for step, rank in ((4, 1), (8, 0)):
        kill_rank_after(tmp_path / "run", step, train.pid, rank, killed)
    said = train.communicate(timeout=280)[0]
    assert train.returncode == 0 and len(killed) == 2, said
    ours, theirs = (account(open_store(str(root / "run"))) for root in (tmp_path, folder))
    assert ours.ledger_head == theirs.ledger_head and ours.trajectory_root == theirs.trajectory_root
    # Each new try began at the newest checkpoint, 4 or 8, and repeated what the ledger had beyond it.
    store = open_store(str(tmp_path / "run"))
    starts = [SegmentStart.parse(store.read(key), key) for key in store.list("segments/") if key.endswith("start.json")]
    assert [start.first_step for start in starts][:2] == [0, 4] and len(starts) == 4
    assert sum(start.recorded_steps > start.first_step for start in starts) == 2
    assert 8 in ours.validated and set(ours.validated) <= set(range(4, 12))
    assert store.list("lease/") == []
