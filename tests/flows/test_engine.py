"""Flows as this project runs them: prompt at their end, and heard of until then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from datetime import datetime
from typing import Any

from tests.flows.conftest import ROOT

SHORT = """
import json, time
from flows.engine import flow

@flow
def short():
    return 1

seconds = []
for _ in range(5):
    began = time.monotonic()
    short()
    seconds.append(time.monotonic() - began)
print(json.dumps(seconds))
"""
LONG = """
import json, time
from datetime import datetime, timezone
from prefect.runtime import flow_run
from flows.engine import flow

@flow
def long():
    time.sleep(2.5)
    return str(flow_run.id)

from prefect.flow_engine import FlowRunEngine
FlowRunEngine.heartbeat_seconds = 1
found = long()
print(json.dumps([found, datetime.now(timezone.utc).isoformat()]))
time.sleep(2.5)
"""


def run(code: str) -> str:
    """The last line that the code prints, beside the tests' server."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, check=True, text=True
    ).stdout.splitlines()[-1]


def test_a_flow_ends_when_its_function_does(api: str) -> None:
    """Prefect's own never ends within a second."""
    assert min(json.loads(run(SHORT))) < 0.9


def test_a_flow_is_heard_of_until_it_ends(api: str) -> None:
    flow_run, ended = json.loads(run(LONG))
    for beat in heartbeats(api, flow_run):
        assert datetime.fromisoformat(beat["occurred"]) < datetime.fromisoformat(ended)
        assert "flow" in [related["prefect.resource.role"] for related in beat["related"]]  # what pool.give_up() asks


def heartbeats(api: str, flow_run: str) -> list[dict[str, Any]]:
    """A flow run's, three or more, which the server writes a little late."""
    resource = {"id": [f"prefect.flow-run.{flow_run}"]}
    asked = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource}}
    request = urllib.request.Request(
        f"{api}/events/filter", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    limit = time.monotonic() + 30
    found: list[dict[str, Any]] = []
    while len(found) < 3:
        assert time.monotonic() < limit, found
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer)["events"]
        time.sleep(0.5)
    return found
