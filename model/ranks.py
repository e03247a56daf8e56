"""Several processes that do a step together, over torch.distributed: integers are summed across them, bytes gathered.

    int64 sums       every rank sends each owner its rows, and the owner adds them: a reduce-scatter of integers, made
                     of an all-to-all, since gloo's own reduce-scatter takes five times as long
    int8, bf16, …    gathered as bytes, whole on every rank: codes and scales of the quantised weights, the embedding
                     rounded to bf16 as its look-up rounds it, norm gains
    32 bytes a leaf  of the rows that a rank owns, so that all ranks know every digest and the same roots

World size, batches and who owns what change no bit. Arrays may lie on any backend's device; they travel through the
host.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kernels import digest
from kernels.interface import Weight
from model.group import Digested, Kind, LeavesOf, Tensors, digested
from model.rows import ownership
from model.spec import ModelSpec
from model.stage import STAGE
from model.state import State

NO_LIMIT = timedelta(days=365)
STAGED = 1 << 22  # int64 values that a rank sends at a time
PREFIXES = {"state": ("m/", "v/", "weights/"), "gradient": ("",)}
Width = Callable[[str, int], int]  # (name, rows) → bytes


class Ranks:
    """One rank of the default process group. batch: units whose sums are joined at a time; all of them if None.

    `sent` counts the bytes that leave this rank, by kind; `seconds` its time in collectives and in digests.
    """

    def __init__(self, backend: ModuleType, model: ModelSpec, batch: int | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.backend, self.batch = backend, batch
        self.rows = ownership(model, self.size)
        self.own = self.rows.own(self.rank)
        self.sent: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)

    def batches(self, units: int) -> Iterator[Sequence[int]]:
        """This rank's units by index modulo ranks; as many batches on every rank, the last perhaps empty."""
        own, most = range(self.rank, units, self.size), -(-units // self.size)
        STAGE.turns = len(own)
        size = self.batch or most
        for first in range(0, most, size):
            yield own[first : first + size]

    def new_sums(self, backend: ModuleType, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """Zeros; the parameters of a line one behind the other in memory, so that what a rank owns of it is a piece."""
        sums: Tensors = {}
        self._lines = []
        for line in self.rows.lines:
            ends = np.cumsum([int(np.prod(shapes[name])) for name in line], dtype=np.int64)
            self._lines.append(flat := backend.new_sums((int(ends[-1]),)))
            for name, end in zip(line, ends):
                sums[name] = flat[end - int(np.prod(shapes[name])) : end].reshape(shapes[name])
        return sums

    def joined(self, sums: Tensors, before: Tensors) -> Tensors:
        """Own rows of the sums that new_sums() gave last, over all ranks."""
        own: Tensors = {}
        for line, flat in zip(self.rows.lines, self._lines):
            counts = self.rows.elements(line)
            piece, at = self._reduce_scatter(self.backend.to_host(flat), counts), 0
            for name in (name for name in line if name in self.own):
                rows = self.own[name]
                shape = (rows.stop - rows.start, *self.rows.shapes[name][1:])
                size = int(np.prod(shape))
                own[name] = self.backend.to_device(piece[at : at + size].reshape(shape))
                at += size
        self._lines = []
        for name, earlier in before.items():
            own[name] += earlier
        return own

    def _reduce_scatter(self, flat: np.ndarray, counts: list[int]) -> np.ndarray:
        """This rank's piece i64 of the sum of all ranks' arrays, cut into pieces of these lengths."""
        starts = np.cumsum([0, *counts], dtype=np.int64)
        result = np.empty(counts[self.rank], np.int64)
        step = max(1, STAGED // self.size)
        for first in range(0, max(counts), step):
            sizes = [max(0, min(step, count - first)) for count in counts]
            cuts = [flat[start + first : start + first + size] for start, size in zip(starts, sizes)]
            mine = sizes[self.rank]
            parts = np.empty(mine * self.size, np.int64)
            with _meeting(self.seconds, "gradients"):
                dist.all_to_all_single(_tensor(parts), _tensor(np.concatenate(cuts)), [mine] * self.size, sizes)
            self.sent["gradients"] += 8 * sum(sizes) - 8 * mine
            np.sum(parts.reshape(self.size, mine), axis=0, dtype=np.int64, out=result[first : first + mine])
        return result

    def total(self, *values: int) -> list[int]:
        """The sum over ranks of each value, which must fit into 64 bits."""
        array = torch.tensor(values, dtype=torch.int64)
        with _meeting(self.seconds, "scalars"):
            dist.all_reduce(array)
        self.sent["scalars"] += 8 * len(values)
        return [int(value) for value in array]

    def counts(self, own: dict[str, int]) -> dict[str, int]:
        """The sum over ranks of a number by parameter, of every parameter."""
        names = list(self.rows.shapes)
        return dict(zip(names, self.total(*(own.get(name, 0) for name in names))))

    def tables(self, own: Tensors) -> Tensors:
        """Embedding, from bf16, and norm gains, f32 on the device."""
        b = self.backend
        tables = {name: b.to_host(table) for name, table in own.items() if table.ndim == 1}
        if "embed" in own:
            rows = b.to_device(np.arange(own["embed"].shape[0]))
            tables["embed"] = b.to_host(b.embed(b.to_device(own["embed"]), rows))
        kinds, shapes = [*self.rows.lines[1], *self.rows.lines[2]], self.rows.shapes
        width = {name: 2 * shapes[name][1] if name == "embed" else 4 for name in kinds}
        found = self._gather("tables", tables, kinds, lambda name, rows: rows * width[name])
        whole = {name: data.view(np.float32) for name, data in found.items() if name != "embed"}
        bits = found["embed"].view(np.uint16).reshape(shapes["embed"])
        return {name: b.to_device(table) for name, table in whole.items()} | {"embed": b.to_device(_widened(bits))}

    def codes(self, own: dict[str, Weight]) -> dict[str, Weight]:
        """Quantised weights from quantised rows; the layout is made again where the backend has one."""
        b, shapes, line = self.backend, self.rows.shapes, self.rows.lines[0]
        packed = {name: _packed(b.to_host(w.hi), b.to_host(w.scale)) for name, w in own.items()}
        found = self._gather("codes", packed, line, lambda name, rows: rows * (shapes[name][1] + 4))
        whole = {}
        for name, data in found.items():
            rows = data.reshape(shapes[name][0], shapes[name][1] + 4)
            hi, scale = (np.ascontiguousarray(part) for part in (rows[:, :-4].view(np.int8), rows[:, -4:]))
            placed = b.to_device(hi)
            layout = placed.t().contiguous() if isinstance(placed, torch.Tensor) else None
            whole[name] = Weight(placed, b.to_device(scale.view(np.float32).reshape(-1)), layout)
        return whole

    def squares(self, own: Tensors) -> Tensors:
        """One f32 a row, of every row of every parameter, on the host."""
        shapes = self.rows.shapes
        host = {name: self.backend.to_host(rows) for name, rows in own.items()}
        found = self._gather("squares", host, shapes, lambda name, rows: 4 * (rows if len(shapes[name]) > 1 else 1))
        return {name: data.view(np.float32) for name, data in found.items()}

    def digests(self, own: Mapping[str, Any], leaves_of: LeavesOf, kind: Kind) -> Digested:
        """Each rank digests the leaves that it owns; they are told, and make the digest of each whole tensor."""
        dtype = np.dtype(np.int64 if kind == "gradient" else np.float32)
        whole = {prefix + name: shape for prefix in PREFIXES[kind] for name, shape in self.rows.shapes.items()}
        began = time.perf_counter()
        leaves = {name: np.frombuffer(found, np.uint8) for name, found in leaves_of(own).items()}
        self.seconds["hashing"] += time.perf_counter() - began
        found = self._gather(
            "digests", leaves, whole, lambda name, rows: 32 * -(-rows // digest.leaf_rows(whole[name], dtype.itemsize))
        )
        zero = np.zeros((), dtype)
        tensors = {name: np.broadcast_to(zero, shape) for name, shape in whole.items()}
        return digested(tensors, {name: found[name].tobytes() for name in whole})

    def whole(self, own: Tensors) -> Tensors:
        """Every gradient i64, whole, on the host of every rank."""
        shapes = self.rows.shapes
        host = {name: self.backend.to_host(rows) for name, rows in own.items()}
        found = self._gather("whole", host, shapes, lambda name, rows: 8 * rows * int(np.prod(shapes[name][1:])))
        return {name: data.view(np.int64).reshape(shapes[name]) for name, data in found.items()}

    def _gather(
        self, kind: str, own: Mapping[str, np.ndarray], names: Iterable[str], width: Width
    ) -> dict[str, np.ndarray]:
        """The bytes of each name, the owners' in the order of its rows. own: what this rank has; width: of any rows."""
        names = sorted(names)
        spans = {name: self.rows.spans[name.rpartition("/")[2]] for name in names}
        sizes = [0] * self.size
        for name in names:
            for rank, first, last in spans[name]:
                sizes[rank] += width(name, last - first)
        longest = max(sizes)
        mine, everything = np.zeros(longest, np.uint8), np.empty(longest * self.size, np.uint8)
        if own:
            data = [np.ascontiguousarray(own[name]).reshape(-1).view(np.uint8) for name in names if name in own]
            np.concatenate(data, out=mine[: sizes[self.rank]])
        with _meeting(self.seconds, kind):
            dist.all_gather(list(_tensor(everything).chunk(self.size)), _tensor(mine))
        self.sent[kind] += longest * (self.size - 1)
        at, found = [rank * longest for rank in range(self.size)], {}
        for name in names:
            parts = []
            for rank, first, last in spans[name]:
                start, at[rank] = at[rank], at[rank] + width(name, last - first)
                parts.append(everything[start : at[rank]])
            found[name] = np.concatenate(parts)
        return found

    def scattered(self, state: State | None) -> State:
        """Each rank's own rows of the state that rank 0 gives."""
        scalars = told(None if state is None else state.scalars())
        tensors = {} if state is None else {n: self.backend.to_host(x) for n, x in state.tensors().items()}
        own: dict[str, np.ndarray] = {}
        for name, rank, rows, shape in self._pieces():
            if rank == self.rank:
                own[name] = tensors[name][rows].copy() if self.rank == 0 else np.empty(shape, np.float32)
            if rank != 0 and rank == self.rank:
                _recv(own[name], 0)
            elif rank != 0 and self.rank == 0:
                _send(np.ascontiguousarray(tensors[name][rows]), rank)
        return State.of(own, scalars).placed(self.backend.to_device)

    def gathered(self, state: State) -> State | None:
        """The whole state on the host of rank 0, None on others."""
        own, whole = state.placed(self.backend.to_host).tensors(), {}
        if self.rank == 0:
            whole = {p + n: np.empty(s, np.float32) for p in PREFIXES["state"] for n, s in self.rows.shapes.items()}
        for name, rank, rows, _ in self._pieces():
            if self.rank == 0 and rank == 0:
                whole[name][rows] = own[name]
            elif self.rank == 0:
                _recv(whole[name][rows], rank)
            elif rank == self.rank:
                _send(np.ascontiguousarray(own[name]), 0)
        if self.rank:
            return None
        return replace(State.of(whole, state.scalars()), spike=state.spike)

    def _pieces(self) -> Iterator[tuple[str, int, slice, tuple[int, ...]]]:
        """(tensor, owner, rows, their shape) of every piece of a state, in one order on all ranks."""
        for prefix in PREFIXES["state"]:
            for name, spans in self.rows.spans.items():
                for rank, first, last in spans:
                    yield prefix + name, rank, slice(first, last), (last - first, *self.rows.shapes[name][1:])


@contextmanager
def launched() -> Iterator[int]:
    """This process as one of those that torchrun started, or alone; yields its rank.

    Ranks that died are known by their connections, ranks that hang by what they tell (storage/watch.py), so the
    library's own limit of a wait is none.
    """
    if not started_by_torchrun():
        yield 0
        return
    dist.init_process_group("gloo", timeout=NO_LIMIT)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def started_by_torchrun() -> bool:
    """Whether this process is a rank."""
    return dist.is_torchelastic_launched()


def told(message: Any = None) -> Any:
    """What rank 0 says, JSON, on every rank."""
    leads = dist.get_rank() == 0
    data = np.frombuffer(json.dumps(message).encode(), np.uint8).copy()
    size = torch.tensor([len(data)])
    with _meeting():
        dist.broadcast(size, 0)
        text = torch.from_numpy(data) if leads else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, 0)
    return json.loads(bytes(text.numpy()))


def shown(array: np.ndarray | None = None) -> np.ndarray:
    """The array that rank 0 gives, as i64 on every rank."""
    shape = told(None if array is None else array.shape)
    shared = np.empty(shape, np.int64) if array is None else np.ascontiguousarray(array, np.int64)
    with _meeting():
        dist.broadcast(_tensor(shared), 0)
    return shared


class Parted(ConnectionError):
    """Another rank has ended, so what all ranks do together cannot be done."""


@contextmanager
def _meeting(seconds: dict[str, float] | None = None, kind: str = "") -> Iterator[None]:
    """Around what the ranks do together: Parted where one is gone, and the time that it took."""
    began = time.perf_counter()
    try:
        with STAGE.meeting():
            yield
    except RuntimeError as error:  # what torch.distributed raises
        raise Parted(STAGE.missing or STAGE.ended() or str(error).split(". ")[0]) from None
    if seconds is not None:
        seconds[kind] += time.perf_counter() - began


def _send(array: np.ndarray, rank: int) -> None:
    with _meeting():
        dist.send(_tensor(array), rank)


def _recv(array: np.ndarray, rank: int) -> None:
    with _meeting():
        dist.recv(_tensor(array), rank)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def _packed(hi: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Rows of codes and, behind each, its scale: u8[R, C + 4]."""
    return np.concatenate([hi.view(np.uint8), np.ascontiguousarray(scale).view(np.uint8).reshape(-1, 4)], axis=1)


def _widened(bits: np.ndarray) -> np.ndarray:
    """bf16 as float32 of the same value."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
