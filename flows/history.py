"""Run flows from a terminal: a server keeps their history, their progress is shown, their logs are in the UI only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from flows import environment, server


@contextlib.contextmanager
def recorded(console: Console, home: Path = environment.PREFECT_HOME) -> Iterator[str]:
    """Yields the API's URL. Import flows inside the block only: Prefect reads its settings when it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    with server.running(home) as url:
        from flows import display

        with display.shown(console):
            yield url
