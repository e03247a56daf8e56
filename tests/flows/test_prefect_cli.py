"""The server as this project starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.flows.conftest import ROOT

SLOTS = """
from prefect import flow, task
from tasks.device import turn

@task
def work():
    with turn("cpu"):
        pass

@flow
def slots():
    for _ in range(5):
        work()

slots()
"""


def test_a_slot_is_had_at_the_first_try(api: str) -> None:
    """Each task tells the server that it starts just before it asks for its slot: both write."""
    once = os.environ | {"PREFECT_CLIENT_MAX_RETRIES": "0"}
    done = subprocess.run([sys.executable, "-c", SLOTS], cwd=ROOT, env=once, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
