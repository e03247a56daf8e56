"""What this machine has for a piece of work: its memory, the plan that fits into it, and moments in mapped files."""

import errno
import math
import mmap
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from model import device_memory, memory
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
DEVICE_SHARE = 7, 8  # of a GPU's free memory; the rest are the gaps between blocks that PyTorch's allocator keeps
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


def plan_for(spec: RunSpec, piece: Piece, device: int | None = None, processes: int = 1) -> MemoryPlan:
    """The fastest plan with which the piece fits into this machine; Refused where not even the leanest does, or where
    the device's kernels do not take the model's sizes.

    device: bytes that are free on the backend's own device, as its device_memory() says; None where it has none.
    processes: how many share the steps and this machine's memory; each has a device of its own.
    """
    if device is not None and piece != "initial":
        _check_widths(spec)
    found = _forecast(spec, piece, device, processes)
    if not found.fits:
        raise _refused(spec, found, device is not None, processes)
    return found.plan


def _check_widths(spec: RunSpec) -> None:
    """Refused where the GPU's kernels do not take the model's sizes."""
    if found := device_memory.too_wide(spec.model):
        raise Refused(
            f"{spec.name}: {found} by the backend nvidia",
            cause="its kernels hold a whole row at a time, and a head's tiles",
            next_step="use --backend cpu, which gives the same bits",
        )


def _refused(spec: RunSpec, found: "Forecast", on_device: bool, processes: int) -> Refused:
    """Which memory is too small, with both numbers."""
    takes, room, where = memory.total(found.needs), found.available, "this machine"
    what, cause = "by the leanest plan", "a control group allows it less than there is"
    if on_device and takes > room:
        what, where = "of a GPU's memory by the leanest plan", "this GPU"
        cause = "other programs hold some of its memory"
    elif on_device:
        takes, room, what = found.on_host, available(), "of memory beside the GPU's"
    backend = "--backend nvidia " if on_device else ""
    fewer = ""
    if processes > 1:
        what = f"{what} with {processes} processes"
        cause = f"they or the model are too much for {where}, or {cause}"
        fewer = "set a smaller plan.processes in the recipe, which changes no bit; "
    else:
        cause = f"the model is too large for {where}, or {cause}"
    return Refused(
        f"{spec.name}: {LABELS[found.piece]} takes {takes / GB:,.1f} GB {what}, {where} offers {room / GB:,.1f} GB",
        cause=cause,
        next_step=f"{fewer}verbatim doctor {backend}--recipe (or --run) says what every piece takes; use a machine "
        "with more memory",
    )


@dataclass(frozen=True)
class Forecast:
    """What a piece takes on a machine: by the fastest plan that fits, or by the leanest, which does not."""

    piece: Piece
    fits: bool
    plan: MemoryPlan
    needs: memory.Needs
    on_disk: int  # bytes
    available: int  # bytes
    on_host: int  # bytes of the machine's own memory, where the work is a device's

    def document(self) -> dict[str, Any]:
        """For JSON: bytes by purpose, and what there is."""
        numbers = {
            "takes": memory.total(self.needs),
            "available": self.available,
            "on_disk": self.on_disk,
            "on_host": self.on_host,
            "by_purpose": self.needs,
        }
        named = {"piece": self.piece, "what": LABELS[self.piece], "plan": str(self.plan)}
        return named | {"fits": self.fits} | numbers


def forecast(spec: RunSpec, device: int | None = None, processes: int = 1) -> list[Forecast]:
    """What each piece of work on this run takes, and by which plan this machine would do it; allocates nothing.

    device: as for plan_for(). processes: that train together; all else is done by one. Refused where the device's
    kernels do not take the model's sizes.
    """
    if device is not None:
        _check_widths(spec)
    return [_forecast(spec, piece, device, processes if piece == "training" else 1) for piece in memory.PIECES]


def _forecast(spec: RunSpec, piece: Piece, device: int | None, processes: int = 1) -> Forecast:
    room, on_host = available(), 0
    count: memory.Count = partial(memory.needs, processes=processes)
    if device is not None:
        room, on_host = device * DEVICE_SHARE[0] // DEVICE_SHARE[1], device_memory.on_host(spec, piece, processes)
        count = partial(device_memory.needs, processes=processes)
    chosen = memory.choose(spec, piece, room, count)
    plan = chosen or memory.leanest(spec, piece, count)
    fits = chosen is not None and on_host <= available()
    return Forecast(piece, fits, plan, count(spec, plan, piece), memory.on_disk(spec, plan, piece), room, on_host)


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
