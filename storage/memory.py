"""What this machine has for a piece of work: its memory, the plan that fits into it, and moments in mapped files."""

import errno
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model import memory
from model.memory import MemoryPlan, Piece
from model.spec import RunSpec
from model.state import zeros
from storage.errors import Refused, StorageError
from storage.store import LocalStore, Store

GB = 1e9
LABELS: dict[Piece, str] = {
    "unit": "the gradient of one unit",
    "step": "one step",
    "training": "training",
    "initial": "drawing the initial weights",
}
SHARE = 15, 16  # of the machine's memory; the rest is the system's
ALIGNED = 64  # bytes
IN_MEMORY = ("tmpfs", "ramfs")
Allocate = Callable[[tuple[int, ...]], np.ndarray]  # shape → float32 zeros


def machine_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less where a control group limits it."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _text(root / "proc/self/cgroup").split("\n"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        else:
            continue
        group = base / path.lstrip("/")
        folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(base)]
        found = [_text(folder / name).strip() for folder in folders]
        limits += [int(text) for text in found if text.isdecimal()]  # else "max", or hidden from this process
    return min(limits)


def available() -> int:
    """Bytes that a piece of work may plan with on this machine."""
    return machine_memory() * SHARE[0] // SHARE[1]


def plan_for(spec: RunSpec, piece: Piece, processes: int = 1) -> MemoryPlan:
    """The fastest plan with which the piece fits into one process's share of this machine; Refused where not even the
    leanest does."""
    room = available() // processes
    plan = memory.choose(spec, piece, room)
    if plan is None:
        least = memory.total(memory.needs(spec, memory.leanest(spec, piece), piece))
        raise Refused(
            f"{spec.name}: {LABELS[piece]} takes {least / GB:,.1f} GB by the leanest plan, this machine offers "
            f"{room / GB:,.1f} GB",
            cause="the model is too large for this machine, or a control group allows it less than there is",
            next_step="verbatim doctor --recipe (or --run) says what every piece takes; use a machine with more memory",
        )
    return plan


@dataclass(frozen=True)
class Forecast:
    """What a piece takes on a machine: by the fastest plan that fits, or by the leanest, which does not."""

    piece: Piece
    fits: bool
    plan: MemoryPlan
    needs: memory.Needs
    on_disk: int  # bytes
    available: int  # bytes

    def document(self) -> dict[str, Any]:
        """For JSON: bytes by purpose, and what there is."""
        numbers = {
            "takes": memory.total(self.needs),
            "available": self.available,
            "on_disk": self.on_disk,
            "by_purpose": self.needs,
        }
        named = {"piece": self.piece, "what": LABELS[self.piece], "plan": str(self.plan)}
        return named | {"fits": self.fits} | numbers


def forecast(spec: RunSpec) -> list[Forecast]:
    """What each piece of work on this run takes, and by which plan this machine would do it; allocates nothing."""
    room, found = available(), []
    for piece in memory.PIECES:
        chosen = memory.choose(spec, piece, room)
        plan = chosen or memory.leanest(spec, piece)
        needs, files = memory.needs(spec, plan, piece), memory.on_disk(spec, plan, piece)
        found.append(Forecast(piece, chosen is not None, plan, needs, files, room))
    return found


def moments(spec: RunSpec, plan: MemoryPlan, store: Store) -> Allocate:
    """Room for one state's moments, array by array: in memory, or in a file beside the run that vanishes with us."""
    if not plan.map_moments:
        return zeros
    return _Mapped(beside(store), [shape for shape in spec.model.shapes().values() for _ in range(2)])


def beside(store: Store) -> Path:
    """A folder on a disk that may be written, the store's own if it can be."""
    folders = [store.root] if isinstance(store, LocalStore) else []
    folders += [Path("/var/tmp"), Path(tempfile.gettempdir())]
    for folder in folders:
        if os.access(folder, os.W_OK | os.X_OK) and not _in_memory(folder):
            return folder
    raise StorageError(
        f"no folder for the moments' file: {', '.join(map(str, folders))} cannot be written, or lie in memory",
        next_step="set TMPDIR to a folder on a disk",
    )


class _Mapped:
    """Arrays carved in turn from one file that has no name: it is gone when the last of them is, or the process."""

    def __init__(self, folder: Path, shapes: list[tuple[int, ...]]) -> None:
        size = sum(_aligned(shape) for shape in shapes)
        try:
            with tempfile.TemporaryFile(prefix=".tmp-", dir=folder) as file:
                _reserve(file.fileno(), size)
                self._memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise StorageError(
                f"{folder}: the moments' file of {size / GB:,.1f} GB cannot be made: {error.strerror}",
                cause="the disk is full" if error.errno == errno.ENOSPC else "",
                next_step="free some space and run the same command again",
            ) from error
        self._next = 0

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        start, self._next = self._next, self._next + _aligned(shape)
        return np.frombuffer(self._memory, np.float32, math.prod(shape), start).reshape(shape)


def _aligned(shape: tuple[int, ...]) -> int:
    return -(-4 * math.prod(shape) // ALIGNED) * ALIGNED


def _reserve(file: int, size: int) -> None:
    """Give the file its size, and its blocks: a write into a mapping finds no error to return when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _in_memory(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether the file system of a folder lives in memory, as far as the system says."""
    longest, kind = -1, ""
    for line in _text(mounts).split("\n")[:-1]:
        _, place, found, *_ = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place)  # a space is \040 there
        if folder.resolve().is_relative_to(place) and len(place) >= longest:
            longest, kind = len(place), found
    return kind in IN_MEMORY


def _text(path: Path) -> str:
    """A file of the system's, "" if there is none; the names in it need not be UTF-8."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
