"""Prefect's command line as this project serves it: `python -m flows.prefect_cli server start`.

With its first UI alone: the second fetches a configuration from another host, even with analytics off, and no setting
hides it. And SQLite's transactions that may write take the lock when they begin. Prefect's begin as readers; one that
writes after another has is refused at once, and the flow that asked waits two seconds before it asks again. The server
gives way to whoever computes.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import prefect
from prefect.cli import app
from prefect.server.api import background_workers
from prefect.server.database.configurations import AioSqliteConfiguration

# Between two looks, in memory, for services whose time has come; Prefect has 0.25 s.
LOOK = timedelta(seconds=1)
NICE = 10

_begin = AioSqliteConfiguration.begin_transaction


def _begin_locked(config: AioSqliteConfiguration, session: Any, with_for_update: bool = False) -> Any:
    return _begin(config, session, with_for_update=True)


def _give_way() -> None:
    """To whoever computes: in this session and, where Linux weighs whole sessions (autogroup), in others."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # there is no such file where it does not
        Path("/proc/self/autogroup").write_text(str(NICE))


if __name__ == "__main__":
    prefect.__ui_v2_static_path__ = Path("not-offered")  # a UI without files is passed over
    AioSqliteConfiguration.begin_transaction = _begin_locked  # type: ignore[assignment, method-assign]
    background_workers.Worker = partial(  # type: ignore[assignment, misc]
        background_workers.Worker, minimum_check_interval=LOOK, scheduling_resolution=LOOK
    )
    _give_way()
    app()
