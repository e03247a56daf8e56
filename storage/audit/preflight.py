"""Before a piece of an audit is loaded: what it takes of memory and disk, what is free, by which plan it is done."""

import os
import re
import shutil
from pathlib import Path
from types import ModuleType

from model import memory
from model.memory import MemoryPlan, Piece
from model.spec import RunSpec
from storage.audit.verdict import AuditProgress, Report
from storage.errors import Refused
from storage.memory import GB, forecast, plan_for
from storage.store import LocalStore, Store


def preflight(
    spec: RunSpec, piece: Piece, backend: ModuleType, report: Report, target: Store | None = None, writes: int = 0
) -> MemoryPlan:
    """The plan for the piece, its needs reported; Refused where memory is too small, or the disk of `target`, on which
    `writes` bytes will be written.
    """
    device = backend.device_memory()
    plan = plan_for(spec, piece, device)
    found = next(each for each in forecast(spec, device) if each.piece == piece)
    free = found.available if device is not None else _free_memory()
    said = f"needs {memory.total(found.needs) / GB:,.2f} GB of memory, {free / GB:,.2f} GB are free"
    if isinstance(target, LocalStore):
        room = _free_disk(target.root)
        said += f"; {writes / GB:,.2f} GB of disk, {room / GB:,.2f} GB are free"
        if room < writes:
            raise Refused(
                f"{target.uri}: {writes / GB:,.2f} GB will be written there, {room / GB:,.2f} GB are free",
                next_step="free some space and run the same command again",
            )
    report(AuditProgress(said, None, 0, 0, None))
    return plan


def _free_memory() -> int:
    """Bytes that the system could give now; all of its memory where it does not say."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_disk(folder: Path) -> int:
    """Bytes that can be written in a folder, which need not exist yet."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(there).free
