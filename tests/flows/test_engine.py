"""Flows as this project runs them: prompt at their end, and heard of until then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import flow_engine

from flows import engine
from tests.flows.conftest import ROOT
from tests.ui.served import call, until

LONG = """
import json, time
from datetime import datetime, timezone
from prefect.runtime import flow_run
from flows import engine

@engine.flow
def long():
    time.sleep(2.5)
    return str(flow_run.id)

engine.HEARTBEAT = 0.5
found = long()
print(json.dumps([found, datetime.now(timezone.utc).isoformat()]))
"""


class Run:
    """A flow run as its engine shows it, whose first heartbeat cannot be sent."""

    def __init__(self) -> None:
        self.tried, self.final, self.logged = 0, False, 0
        self.third = threading.Event()
        self.state = SimpleNamespace(is_final=lambda: self.final)
        self.logger = SimpleNamespace(exception=self._log)

    def _log(self, _: str) -> None:
        self.logged += 1

    def _emit_flow_run_heartbeat(self) -> None:
        self.tried += 1
        if self.tried == 3:
            self.third.set()
        if self.tried == 1:
            raise OSError("no server")


def beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == engine.THREAD]


def test_a_flow_does_not_wait_for_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flow_engine._send_heartbeats is engine._heartbeats
    monkeypatch.setattr(engine, "HEARTBEAT", 3600.0)
    run = Run()
    with engine._heartbeats(run):  # type: ignore[arg-type]
        (thread,) = beating()
    thread.join(60)
    assert not thread.is_alive() and run.tried <= 1


def test_a_heartbeat_that_fails_is_told_and_the_next_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "HEARTBEAT", 0.01)
    run = Run()
    with engine._heartbeats(run):  # type: ignore[arg-type]
        assert run.third.wait(60)
        assert run.logged == 1
        run.final = True  # as once the server has been told that the run is completed
        for thread in beating():
            thread.join(60)
            assert not thread.is_alive()


def test_the_server_hears_of_a_flow(api: str) -> None:
    command = [sys.executable, "-c", LONG]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, check=True, text=True)
    flow_run, ended = json.loads(done.stdout.splitlines()[-1])
    for beat in heartbeats(api, flow_run):
        assert datetime.fromisoformat(beat["occurred"]) < datetime.fromisoformat(ended)
        assert "flow" in [related["prefect.resource.role"] for related in beat["related"]]  # what pool.give_up() asks


def heartbeats(api: str, flow_run: str) -> list[dict[str, Any]]:
    """A flow run's, three or more, which the server writes a little late."""
    resource = {"id": [f"prefect.flow-run.{flow_run}"]}
    asked = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": resource}}

    def ask() -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = call(api, "POST", "/events/filter", asked)["events"]
        return events if len(events) >= 3 else []

    return until("three heartbeats are on the server", ask, 60)
