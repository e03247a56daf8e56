"""Prefect's own `flow`, for which importing this module replaces, in the whole process, one private part of its engine:
`_send_heartbeats`, whose thread sleeps a second at a time and is waited for at the end of each flow. A pipeline is of
six flows. The heartbeat here ends at once.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow, flow_engine

from flows.environment import HEARTBEAT

__all__ = ["flow"]
THREAD = "heartbeat"


@contextmanager
def _heartbeats(engine: flow_engine.FlowRunEngine[Any, Any], join_on_exit: bool = False) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not (over.is_set() or engine.state.is_final()):
            try:
                engine._emit_flow_run_heartbeat()
            except Exception:  # whatever it is: a thread that ended would give a living run to another worker
                engine.logger.exception("a heartbeat was not sent")
            over.wait(HEARTBEAT)

    # In the flow's own context, which says what server it has.
    threading.Thread(name=THREAD, target=contextvars.copy_context().run, args=(beat,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


flow_engine._send_heartbeats = _heartbeats  # type: ignore[assignment]
