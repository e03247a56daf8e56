"""The work pool of a running server: what it offers, who takes over a lost run, how all that runs in it is cancelled.

Import it inside `server.running()` only: Prefect reads its settings when it is imported.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from prefect import get_client
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows import environment
from storage.errors import VerbatimError
from tasks.device import PREFIX, SLOTS

# Seconds that cancelled runs may take to end: a child has 20 to save its state, Prefect then looks for hooks.
PATIENCE = 60.0
NAME = "verbatim-local"  # as deployments/prefect.yaml has it
BEAT = "prefect.flow-run.heartbeat"
LIVE = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def declare(lost_after: float) -> None:
    """The pool, the deployments of deployments/prefect.yaml, slots of devices, and what becomes of a run whose process
    was killed. Slots that a person changed stay as they are."""
    _prefect("work-pool", "create", NAME, "--type", "process", "--overwrite")
    _prefect("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    with get_client(sync_client=True) as client:
        known_limits = {limit.name for limit in client.read_global_concurrency_limits(limit=200)}
        for backend, slots in SLOTS.items():
            if (name := f"{PREFIX}{backend}") not in known_limits:
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
        for automation in (take_over(lost_after), give_up(2 * lost_after)):
            known = client.read_automations_by_name(automation.name)
            if known:
                client.update_automation(known[0].id, automation)
            else:
                client.create_automation(automation)


def take_over(seconds: float) -> AutomationCore:
    """A deployment's run without a heartbeat for so long goes back into the queue: any worker goes on with it."""
    return AutomationCore(
        name="take over a lost run",
        description="Its worker was killed; what it had finished is kept.",
        trigger=_silent(seconds, "deployment"),
        actions=[_change(StateType.SCHEDULED, "AwaitingRetry", "its worker was lost")],
    )


def give_up(seconds: float) -> AutomationCore:
    """A run that nobody takes over, since a person started it from a terminal, is shown as crashed."""
    return AutomationCore(
        name="mark a lost run",
        description="Its process was killed. Start it again: what it had finished is kept.",
        trigger=_silent(seconds, "flow"),
        actions=[_change(StateType.CRASHED, "Crashed", "its process was lost; start it again")],
    )


def _change(state: StateType, name: str, message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=state, name=name, message=message, force=False)


def _silent(seconds: float, role: str) -> EventTrigger:
    """A flow run that belongs to something of this role had a heartbeat, and then nothing at all was heard of it."""
    return EventTrigger(
        after={BEAT},
        expect={"prefect.flow-run.*"},
        for_each={"prefect.resource.id"},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        match_related=ResourceSpecification({"prefect.resource.role": role}),
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )


def cancel_all(say: Callable[[str], None]) -> None:
    """Cancel what runs in the pool, and wait for it, for so long as saving a state may take."""
    with get_client(sync_client=True) as client:
        for run in _live(client):
            say(f"cancelling {run.name} ...")
            client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
        limit = time.monotonic() + PATIENCE
        while (left := _live(client)) and time.monotonic() < limit:
            time.sleep(0.5)
    for run in left:
        say(f"{run.name} does not end; it is left to end by itself within seconds")


def _live(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=LIVE))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[NAME])),
    )


def _prefect(*arguments: str) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=environment.PROJECT, capture_output=True, text=True)
    if done.returncode:
        raise VerbatimError(f"`prefect {' '.join(arguments)}` failed:\n{done.stdout}{done.stderr}")
