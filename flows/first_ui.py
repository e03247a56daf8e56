"""Prefect's command line with its first UI alone: `python -m flows.first_ui server start`.

The second UI fetches a configuration from another host, even with analytics off, and no setting hides it.
"""

from __future__ import annotations

from pathlib import Path

import prefect
from prefect.cli import app

if __name__ == "__main__":
    prefect.__ui_v2_static_path__ = Path("not-offered")  # a UI without files is passed over
    app()
