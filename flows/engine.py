"""Prefect's `flow`, for the flows of this project: it ends when its function does.

A flow tells the server every PREFECT_FLOWS_HEARTBEAT_FREQUENCY seconds that it lives. Prefect does so from a thread
that sleeps a second at a time, and joins it at the end of a flow; a pipeline is of seven flows.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow, flow_engine

__all__ = ["flow"]


@contextmanager
def _heartbeats(engine: flow_engine.FlowRunEngine[Any, Any]) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.is_set():
            engine._emit_flow_run_heartbeat()  # into a queue; what fails behind it, Prefect logs
            over.wait(engine.heartbeat_seconds)

    # In the flow's own context, which says what server it has.
    threading.Thread(target=contextvars.copy_context().run, args=(beat,), daemon=True).start()
    try:
        yield
    finally:
        over.set()


flow_engine._send_heartbeats = _heartbeats  # type: ignore[assignment]
