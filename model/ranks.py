"""Several processes that do a step together, over torch.distributed: integers are summed across them, bytes gathered.

    int64 sums       reduce-scattered: each owner has the sum of its rows
    int8, bf16, …    gathered as bytes, whole on every rank: codes and scales of the quantised weights, the embedding
                     rounded to bf16 as its look-up rounds it, norm gains
    float32          of a run whose reduction is ordered: they only move, and `model.ordered` adds
    32 bytes a leaf  of the rows that a rank owns, so that all ranks know every digest and the same roots

World size, batches and who owns what change no bit. Sums, codes and tables go from GPU to GPU where the backend works
on one (wire.py); all else, and everything of other devices, through the host.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kernels import digest
from kernels.interface import Weight
from model.group import ALONE, Digested, Kind, LeavesOf, Tensors, digested
from model.ordered import Order
from model.ordered_ranks import TorchPeers, mesh_peers, own_mean, owned, rank_mean
from model.ordered_step import Gradient, cut
from model.rows import ownership
from model.spec import ModelSpec
from model.stage import STAGE
from model.state import State
from model.wire import Device, Host, Wire

NO_LIMIT = timedelta(days=365)
GATHERING = timedelta(minutes=10)  # for one tensor's rows: nobody does a step before sending or taking them
PATIENCE = timedelta(minutes=10)  # of GPUs that met, for bytes that take them seconds
PREFIXES = {"state": ("m/", "v/", "weights/"), "gradient": ("",), "mean": ("",)}
DTYPES: dict[Kind, torch.dtype] = {"state": torch.float32, "gradient": torch.int64, "mean": torch.float32}
Width = Callable[[str, int], int]  # (name, rows) → elements


class Ranks:
    """One rank of the default process group. batch: units whose sums are joined at a time; all of them if None.

    `sent` counts the bytes that leave this rank, by kind; `seconds` its time in collectives and in digests.
    """

    def __init__(self, backend: ModuleType, model: ModelSpec, batch: int | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.backend, self.batch = backend, batch
        self.rows = ownership(model, self.size)
        self.own = self.rows.own(self.rank)
        flag = backend.new_flag()
        self.device = flag.device if isinstance(flag, torch.Tensor) else None  # None: arrays are NumPy's
        self.host: Wire = Host()
        self.wire: Wire = self.host
        if self.device is not None and self.device.type == "cuda":
            self.wire = Device(self.device, dist.new_group(backend="nccl", timeout=PATIENCE))
        self.sent: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self._mesh: tuple[TorchPeers, TorchPeers] | None = None  # for a reduction that is ordered

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
        self._meet()
        pieces = owned(self.rows, self.rank)
        for line, flat in zip(self.rows.lines, self._lines):
            part = self._reduce_scatter(flat, self.rows.elements(line))
            own |= cut([piece for piece in pieces if piece.name in line], part)
        with _meeting(self.seconds, "gradients"):
            self.wire.settle()
        self._lines = []
        for name, earlier in before.items():
            own[name] += earlier
        return own

    def passed(self, unit: int, nll: Any, lse2: Any, flag: Any) -> None:
        """Nothing to do."""

    def _meet(self) -> None:
        """Wait for the other ranks; what the own device still does is no wait for them."""
        self.wire.settle()
        with _meeting(self.seconds, "waiting"):
            self.wire.meet()

    def _reduce_scatter(self, flat: Any, counts: list[int]) -> Any:
        """This rank's piece of the sum of all ranks' i64 arrays, cut into pieces of these lengths."""
        whole = _tensor(flat).to(self.wire.device)
        with _meeting(self.seconds, "gradients"):
            piece = self.wire.reduce_scatter(whole, counts)
        self.sent["gradients"] += 8 * (len(whole) - counts[self.rank])
        return self._placed(piece)

    def ordered(self, order: Order, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient) -> Tensors:
        """Own rows of the mean gradient f32, by the ranks of the order, which are all there are; one replays them."""
        if self.size == 1:
            return ALONE.ordered(order, shapes, gradient)
        STAGE.turns = order.micro_batches
        part = rank_mean(order, self.rank, self.rows, gradient)
        self._meet()
        with _meeting(self.seconds, "gradients"):
            self._mesh = self._mesh or mesh_peers(order, NO_LIMIT)
            before = sum(peers.sent for peers in self._mesh)
            own = own_mean(order, self.rows, *self._mesh, part)
            self.sent["gradients"] += sum(peers.sent for peers in self._mesh) - before
        return dict(own)

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
        b, (_, embed, gains), shapes = self.backend, self.rows.lines, self.rows.shapes
        bits = {name: b.embed(own[name], b.to_device(np.arange(len(own[name])))) for name in embed if name in own}
        found = self._gather("tables", bits, embed, torch.int16, lambda name, rows: rows * shapes[name][1])
        whole = {name: _widened(data).reshape(shapes[name]) for name, data in found.items()}
        vectors = {name: table for name, table in own.items() if name not in bits}
        whole |= self._gather("tables", vectors, gains, torch.float32, lambda name, rows: rows)
        return {name: self._placed(table) for name, table in whole.items()}

    def codes(self, own: dict[str, Weight]) -> dict[str, Weight]:
        """Quantised weights from quantised rows; the layout is made again where the backend has one."""
        shapes, line = self.rows.shapes, self.rows.lines[0]
        hi = {name: weight.hi for name, weight in own.items()}
        scale = {name: weight.scale for name, weight in own.items()}
        codes = self._gather("codes", hi, line, torch.int8, lambda name, rows: rows * shapes[name][1])
        scales = self._gather("codes", scale, line, torch.float32, lambda name, rows: rows)
        return {
            name: self.backend.weight_of(self._placed(data.reshape(shapes[name])), self._placed(scales[name]))
            for name, data in codes.items()
        }

    def squares(self, own: Tensors) -> Tensors:
        """One f32 a row, of every row of every parameter, on the host."""
        shapes = self.rows.shapes
        found = self._gather(
            "squares", own, shapes, torch.float32, lambda name, rows: rows if len(shapes[name]) > 1 else 1, fetch=True
        )
        return {name: data.numpy() for name, data in found.items()}

    def digests(self, own: Mapping[str, Any], leaves_of: LeavesOf, kind: Kind) -> Digested:
        """Each rank digests the leaves that it owns; they are told, and make the digest of each whole tensor."""
        dtype = DTYPES[kind]
        whole = {prefix + name: shape for prefix in PREFIXES[kind] for name, shape in self.rows.shapes.items()}
        began = time.perf_counter()
        leaves = {name: np.frombuffer(bytearray(found), np.uint8) for name, found in leaves_of(own).items()}
        self.seconds["hashing"] += time.perf_counter() - began
        width = {name: digest.leaf_rows(shape, dtype.itemsize) for name, shape in whole.items()}
        found = self._gather(
            "digests", leaves, whole, torch.uint8, lambda name, rows: 32 * -(-rows // width[name]), wire=self.host
        )
        zero = torch.zeros((), dtype=dtype).numpy()
        tensors = {name: np.broadcast_to(zero, shape) for name, shape in whole.items()}
        return digested(tensors, {name: found[name].numpy().tobytes() for name in whole})

    def whole(self, own: Tensors, kind: Kind) -> Tensors:
        """Every gradient, whole, on the host of every rank."""
        shapes = self.rows.shapes
        width = {name: int(np.prod(shape[1:])) for name, shape in shapes.items()}
        found = self._gather("whole", own, shapes, DTYPES[kind], lambda name, rows: rows * width[name], wire=self.host)
        return {name: data.numpy().reshape(shapes[name]) for name, data in found.items()}

    def _gather(
        self,
        kind: str,
        own: Mapping[str, Any],
        names: Iterable[str],
        dtype: torch.dtype,
        width: Width,
        wire: Wire | None = None,
        fetch: bool = False,
    ) -> dict[str, torch.Tensor]:
        """The elements of each name in one row, the owners' in the order of its rows, where the wire has them or, to
        `fetch` them, on the host. own: what this rank has; width: of any rows."""
        names, wire = sorted(names), wire or self.wire
        spans = {name: self.rows.spans[name.rpartition("/")[2]] for name in names}
        sizes = [0] * self.size
        for name in names:
            for rank, first, last in spans[name]:
                sizes[rank] += width(name, last - first)
        mine = torch.zeros(max(sizes), dtype=dtype, device=wire.device)
        at, found = 0, dict[str, torch.Tensor]()
        for rows in (_tensor(own[name]).reshape(-1) for name in names if name in own):
            mine[at : at + len(rows)] = rows
            at += len(rows)
        with _meeting(self.seconds, kind):
            everything = wire.all_gather(mine.view(torch.uint8)).view(dtype)
        self.sent[kind] += mine.nbytes * (self.size - 1)
        everything, ends = everything.cpu() if fetch else everything, [0] * self.size
        for name in names:
            parts = []
            for rank, first, last in spans[name]:
                start, ends[rank] = ends[rank], ends[rank] + width(name, last - first)
                parts.append(everything[rank, start : ends[rank]])
            found[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found

    def _placed(self, x: torch.Tensor) -> Any:
        """What came by a wire, as the backend has it."""
        return x.numpy() if self.device is None else x.to(self.device)

    def scattered(self, state: State | None) -> State:
        """Each rank's own rows of the state that rank 0 gives; opens the connections that gathered() takes."""
        self._aside = dist.new_group(backend="gloo", timeout=GATHERING)
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
        """The whole state on the host of rank 0, None on others. It has connections of its own: in a thread of every
        rank it may go on while they do steps."""
        own, whole = state.placed(self.backend.to_host).tensors(), {}
        if self.rank == 0:
            whole = {p + n: np.empty(s, np.float32) for p in PREFIXES["state"] for n, s in self.rows.shapes.items()}
        for name, rank, rows, _ in self._pieces():
            if self.rank == 0 and rank == 0:
                whole[name][rows] = own[name]
            elif self.rank == 0:
                _recv(whole[name][rows], rank, self._aside)
            elif rank == self.rank:
                _send(np.ascontiguousarray(own[name]), 0, self._aside)
        if self.rank:
            return None
        return State.of(whole, state.scalars())

    def _pieces(self) -> Iterator[tuple[str, int, slice, tuple[int, ...]]]:
        """(tensor, owner, rows, their shape) of every piece of a state, in one order on all ranks."""
        for prefix in PREFIXES["state"]:
            for name, spans in self.rows.spans.items():
                for rank, first, last in spans:
                    yield prefix + name, rank, slice(first, last), (last - first, *self.rows.shapes[name][1:])


@contextmanager
def launched(backend: str) -> Iterator[int]:
    """This process as one of those that torchrun started, or alone; yields its rank. Where the backend works on GPUs
    each rank of a machine has one of its own.

    Ranks that died are known by their connections, ranks that hang by what they tell (storage/watch.py), so the
    library's own limit of a wait is none. After an error no leave is taken of the others, which may be gone: that would
    wait for them.
    """
    if not started_by_torchrun():
        yield 0
        return
    if backend.rpartition("checked:")[2] in ("nvidia", "generic:cuda"):
        take_gpu(dist.get_node_local_rank())
    dist.init_process_group("gloo", timeout=NO_LIMIT)
    yield dist.get_rank()
    dist.destroy_process_group()


def take_gpu(index: int) -> None:
    """Make one of this machine's GPUs the one that this process works on; ValueError where it has fewer."""
    if index >= (count := torch.cuda.device_count()):
        raise ValueError(
            f"this machine has {count} GPUs, and process {index} of it has none: a GPU takes one process; start no "
            "more than there are GPUs (the recipe's plan.processes), or take --backend cpu, which gives the same bits"
        )
    torch.cuda.set_device(index)


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


def dealt(windows: np.ndarray | None, unit: int) -> np.ndarray:
    """The windows [N, S + 1] that rank 0 gives, as i64 on every rank: those of its own units, zeros in others' place.

    Units of `unit` windows by index modulo ranks, as `Ranks.batches` counts them. However many ranks there are, rank 0
    sends each window at most once, as i32: no vocabulary is larger.
    """
    rank, size, shape = dist.get_rank(), dist.get_world_size(), told(None if windows is None else windows.shape)
    owner = np.arange(shape[0]) // unit % size
    if windows is not None:
        parts = [np.ascontiguousarray(windows[owner == other], np.int32) for other in range(size)]
        with _meeting():
            sent = [dist.isend(_tensor(parts[other]), other) for other in range(1, size) if len(parts[other])]
            for work in filter(None, sent):
                work.wait()
        return windows.astype(np.int64)
    own = np.empty((np.count_nonzero(owner == rank), shape[1]), np.int32)
    with _meeting():
        if len(own):
            dist.recv(_tensor(own), 0)
    whole = np.zeros(shape, np.int64)
    whole[owner == rank] = own
    return whole


class Parted(ConnectionError):
    """Another rank has ended, so what all ranks do together cannot be done."""


@contextmanager
def _meeting(seconds: dict[str, float] | None = None, kind: str = "") -> Iterator[None]:
    """Around what the ranks do together: Parted where one is gone, and the time that it took."""
    began = time.perf_counter()
    try:
        with STAGE.meeting():
            yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # what torch.distributed raises
        raise Parted(STAGE.missing or STAGE.ended() or str(error).split(". ")[0]) from None
    if seconds is not None:
        seconds[kind] += time.perf_counter() - began


def _send(array: np.ndarray, rank: int, group: dist.ProcessGroup | None = None) -> None:
    with _meeting():
        dist.send(_tensor(array), rank, group)


def _recv(array: np.ndarray, rank: int, group: dist.ProcessGroup | None = None) -> None:
    with _meeting():
        dist.recv(_tensor(array), rank, group)


def _tensor(array: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory; torch has no uint16."""
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


def _widened(bits: torch.Tensor) -> torch.Tensor:
    """bf16, as int16 of the same bits, as float32 of the same value."""
    return (bits.to(torch.int32) << 16).view(torch.float32)
