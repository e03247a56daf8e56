"""The environment variables that every process of the project runs under, in one place.

None of them changes a bit of a run. They keep thread pools from spinning against each other, keep Numba's cache from
returning code compiled from older sources, and keep Prefect and its helpers from calling home.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CACHE = PROJECT / "runs" / "cache"
PREFECT_HOME = PROJECT / "runs" / "prefect"

SPEED = {
    # torch's OpenMP threads otherwise spin while Numba's threads work: five times slower on two cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "NUMBA_THREADING_LAYER": "workqueue",
}
# Where a processor has tiles for matrices (AMX), oneDNN's int8 products are faster without them at the sizes of
# attention and of a linear's block: a step took 0.73 to 0.85 of the time.
NO_TILES = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # The second UI fetches a configuration from outside even with analytics off.
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    # Without a server a flow should fail, not start a hidden one whose history nobody sees.
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
# A server that has nothing to do takes a quarter less of a core with these than with Prefect's own 5 seconds for each.
CALM = {
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "30",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "60",
}
PATIENT = {"PREFECT_CLIENT_MAX_RETRIES": "7"}  # 2, 4, 8, … seconds apart: a server that restarts is waited for
# Seconds between two times that a flow tells the server that it lives (flows/engine.py); a run whose process was killed
# is found by its silence (flows/serving.py).
HEARTBEAT = 30.0


def kernels_digest(folder: Path = PROJECT / "kernels") -> str:
    """SHA-256 (32 hex digits) over the names and bytes of every source file of the kernels."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        body = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()}\0{len(body)}\0".encode())
        total.update(body)
    return total.hexdigest()[:32]


def variables() -> dict[str, str]:
    """Every variable with the value the project wants; a value that the caller has set already wins over these."""
    # Numba does not notice a changed callee in another file, so its cache is named by what was compiled.
    cache = {"NUMBA_CACHE_DIR": str(CACHE / "numba" / kernels_digest()[:16])}
    processor = NO_TILES if has_tiles() else {}
    return {**SPEED, **processor, **QUIET, **CALM, **PATIENT, **cache, "PREFECT_HOME": str(PREFECT_HOME)}


def has_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies tiles of int8 (AMX), as far as Linux says; elsewhere False."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "amx_int8" in line.split() for line in lines)


def apply() -> None:
    """Set them for this process and its children, before torch, Numba or Prefect are imported and read them."""
    for name, value in variables().items():
        os.environ.setdefault(name, value)
