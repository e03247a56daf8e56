"""The memory plan: what a piece of work keeps, what it makes again, and how many bytes that takes, before it starts.

    kept         float32 weights and int64 sums always; int8 codes of all weights, or none
    recomputed   nothing: each layer's trace is kept. n: only the residual stream that enters every n-th layer is; in
                 the backward those n layers' streams are made again, then, from the last to the first, one trace
    mapped       the moments lie in files that the system reads and writes as they are needed
    copied       the state, for a checkpoint that is written while training goes on; or not: then training waits for it

No plan changes a bit: what is recomputed goes through the same functions. The byte counts are of the `cpu` backend:
upper bounds of its arrays and working space, and a measured constant for the program itself. device_memory.py counts
for a GPU.

Of several processes each holds the state and the copy of its own rows, and what it must have whole: int64 sums, all
codes, a table of the embedding; rank 0 at times the whole state besides. They are counted together, on one machine.
"""

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from model.ordered_step import rows_held
from model.rows import ownership
from model.spec import ModelSpec, Ordered, RunSpec
from model.wire import STAGED

Piece = Literal["unit", "step", "training", "initial"]
PIECES: tuple[Piece, ...] = ("unit", "step", "training", "initial")  # unit: its gradients alone
Needs = dict[str, int]  # purpose → bytes
PURPOSES = (
    "weights", "moments", "copy", "gathered", "sums", "codes", "tables", "activations", "working space", "program"
)  # fmt: skip

# Interpreter, PyTorch, Numba and compiled kernels take 0.4 GB; the C library keeps some of what one layer frees.
PROGRAM = 512 << 20
THREADS = os.cpu_count() or 1  # each has buffers of its own
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc alone has it


@dataclass(frozen=True)
class MemoryPlan:
    """recompute: 0 keeps every layer's trace; n keeps the residual stream entering each n-th layer.

    hold_codes: the int8 codes of all weights are held for the step; else each is made when it is used and dropped.
    map_moments: the optimizer's moments lie in memory-mapped files.
    copy_state: training keeps room for a copy of the state, from which checkpoints are written.
    """

    recompute: int = 0
    hold_codes: bool = True
    map_moments: bool = False
    copy_state: bool = True

    @property
    def lean(self) -> bool:
        """Whether freed arrays are given back to the system, layer by layer: worth it only where memory is short."""
        return self.recompute > 0 or not self.hold_codes

    def slowdown(self) -> float:
        """Rough time of a step relative to keeping everything: a backward costs two forwards. For ordering plans."""
        again = self.recompute and 2 - 1 / self.recompute
        return 1 + again / 3 + (not self.hold_codes) * 0.03 + self.map_moments * 0.05 + (not self.copy_state) * 0.01

    def __str__(self) -> str:
        kept = f"the stream entering every {self.recompute}. layer" if self.recompute > 1 else "each layer's input"
        return ", ".join(
            (
                f"keeps {kept if self.recompute else 'every activation'}",
                "all weights' codes held" if self.hold_codes else "weights' codes made when used",
                "moments in files" if self.map_moments else "moments in memory",
                *(() if self.copy_state else ("training waits while a checkpoint is written",)),
            )
        )


Count = Callable[[RunSpec, MemoryPlan, Piece], Needs]  # needs() here, or of device_memory.py
KEEP_ALL = MemoryPlan()


def give_back() -> None:
    """Let the C library return what was freed: of arrays below 32 MB it otherwise keeps all that it ever held."""
    if _trim is not None:
        _trim(0)


def plans(model: ModelSpec) -> Iterator[MemoryPlan]:
    """Every plan worth considering: the streams kept, of every n-th layer and of n, are fewest near n = √layers."""
    for recompute in range(2 + math.isqrt(model.layers)):
        for hold_codes in (True, False):
            for map_moments in (False, True):
                for copy_state in (True, False):
                    yield MemoryPlan(recompute, hold_codes, map_moments, copy_state)


def needs(spec: RunSpec, plan: MemoryPlan, piece: Piece, processes: int = 1) -> Needs:
    """Purpose → bytes of memory at the piece's peak, of `processes` that share its steps. Their total() must be there;
    mapped moments are not in it."""
    if processes > 1:
        return _ranks(spec, plan, processes)
    count = sizes(spec.model).parameters
    always = {"weights": 4 * count, "program": PROGRAM}
    if piece in ("step", "training") and not plan.map_moments:
        always["moments"] = 8 * count
    if piece == "training" and plan.copy_state:
        always["copy"] = 12 * count
    if piece != "initial":
        always["codes"] = sizes(spec.model).codes if plan.hold_codes else 0
        peak: Needs = max(_stages(spec, plan, piece), key=total)
        always |= peak | {"sums": peak["sums"] + (means(spec) if piece != "unit" else 0)}
    return ordered(always)


def _ranks(spec: RunSpec, plan: MemoryPlan, processes: int) -> Needs:
    """What ranks that train take together. They map no moments, and hold codes by any plan."""
    m, own = spec.model, most_owned(spec.model, processes)
    count, codes, table = sizes(m).parameters, sizes(m).codes, 4 * m.vocab * m.d_model
    peak: Needs = max(_stages(spec, plan, "training", processes), key=total)
    rank = {"weights": 4 * own, "moments": 8 * own, "copy": 12 * own * plan.copy_state, "codes": codes, "tables": table}
    found = {purpose: processes * size for purpose, size in (rank | peak | {"program": PROGRAM}).items()}
    found["sums"] += processes * means(spec, processes)
    # The thread that saves may hold the whole state at any time; without one rank 0 does when there are no sums.
    found["gathered"] = 12 * count if plan.copy_state else max(0, 12 * count - total(peak))
    return ordered(found)


@lru_cache
def most_owned(model: ModelSpec, processes: int) -> int:
    """Elements of the parameters that the rank with the most of them owns."""
    rows = ownership(model, processes)
    return max(map(sum, zip(*map(rows.elements, rows.lines), strict=True)))


def ordered(found: Needs) -> Needs:
    """The purposes that take anything, in the order of PURPOSES."""
    return {purpose: found[purpose] for purpose in PURPOSES if found.get(purpose)}


def means(spec: RunSpec, processes: int = 1) -> int:
    """Bytes of float32 that one process holds beside a unit's sums for an ordered reduction; 0 for the exact one."""
    reduction = spec.numerics.reduction
    if not isinstance(reduction, Ordered):
        return 0
    return 4 * sizes(spec.model).parameters * rows_held(reduction.replicas, alone=processes == 1)


def total(needs: Needs) -> int:
    """Bytes for all purposes together."""
    return sum(needs.values())


def choose(spec: RunSpec, piece: Piece, available: int, count: Count = needs) -> MemoryPlan | None:
    """The fastest plan with which the piece fits into `available` bytes by a count, needs() or a device's; None where
    none does."""
    fitting = (plan for plan in plans(spec.model) if total(count(spec, plan, piece)) <= available)
    return min(fitting, key=MemoryPlan.slowdown, default=None)


def leanest(spec: RunSpec, piece: Piece, count: Count = needs) -> MemoryPlan:
    """The plan that takes the least memory by a count."""
    return min(plans(spec.model), key=lambda plan: total(count(spec, plan, piece)))


def on_disk(spec: RunSpec, plan: MemoryPlan, piece: Piece) -> int:
    """Bytes of the files that the moments are mapped from."""
    return 8 * sizes(spec.model).parameters * (plan.map_moments and piece in ("step", "training"))


def _stages(spec: RunSpec, plan: MemoryPlan, piece: Piece, processes: int = 1) -> Iterator[Needs]:
    """Sums, activations and working space where each may be largest.

    Sums that no unit has reached yet are zeros that the system has not made real: in a first unit the embedding's come
    when the layers' activations are gone, if a plan gives them back.
    """
    m, tokens = spec.model, spec.numerics.unit_windows * spec.model.seq_len
    windows = spec.numerics.unit_windows if piece == "unit" else max(phase.windows for phase in spec.schedule.phases)
    stream, every = 2 * tokens * m.d_model, plan.recompute
    if every:
        streams = -(-m.layers // every)
        kept, last, first = (count * stream for count in (streams, streams + every - 2, every - 1))
    else:
        kept = last = m.layers * sum(layer_trace(spec, tokens))
        first = kept // m.layers
    table, whole = 8 * m.vocab * m.d_model, 8 * sizes(m).parameters
    threads = max(1, THREADS // processes)
    layer, buffers = _layer(spec, plan, tokens, threads), _buffers(m, most_slices(spec), tokens, threads)
    first_unit = windows <= spec.numerics.unit_windows * processes
    rest = (whole - 2 * table) // m.layers

    def stage(sums: int, activations: int, working: int) -> Needs:
        batch = 16 * windows * (m.seq_len + 1)
        return {"sums": sums if first_unit else whole, "activations": activations, "working space": working + batch}

    yield stage(table, kept, _head(m, plan, tokens, threads))
    yield stage(table + rest, last, layer)
    yield stage(whole - table, first if plan.lean else kept, layer)
    yield stage(whole, 0 if plan.lean else kept, 4 * stream + buffers)
    if piece == "training":
        yield stage(whole, 0, 5 * sizes(m).largest)  # its squares, and which of its gradients are zero
    if processes > 1:
        own = most_owned(m, processes)
        yield {"working space": sizes(m).codes + 3 * own}  # codes as they come from the others
        yield {"working space": 10 * m.vocab * m.d_model}  # the embedding likewise
        joined = 8 * own + 16 * STAGED["cpu"]  # what the ranks sent of them and what they took beside the whole sums
        yield stage(whole, 0 if plan.lean else kept, joined + buffers)


class Sizes(NamedTuple):
    """Sums over a model's parameters: how many, bytes of the codes of those that are quantised, the largest tensor."""

    parameters: int
    codes: int
    largest: int


@lru_cache
def sizes(model: ModelSpec) -> Sizes:
    """The sums of a model."""
    shapes = model.shapes()
    codes = sum(s[0] * s[1] + 4 * s[0] for name, s in shapes.items() if len(s) == 2 and name != "embed")
    return Sizes(model.parameter_count(), codes, max(math.prod(shape) for shape in shapes.values()))


def layer_trace(spec: RunSpec, tokens: int) -> tuple[int, int]:
    """Bytes of one layer's traces: attention's and the feed-forward's."""
    m = spec.model
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    scales = 4 * (4 + 3 * m.heads + 2 * m.kv_heads)
    attention = 3 * m.d_model + 6 * queries + 4 * keys + scales
    return tokens * attention, tokens * (3 * m.d_model + 4 * m.ffn + spec.numerics.down_slices * m.ffn + 12)


def _layer(spec: RunSpec, plan: MemoryPlan, tokens: int, threads: int) -> int:
    """The peak of one layer's backward, beyond what is kept; its own traces are in it where they are made again."""
    m, (attention, feed_forward) = spec.model, layer_trace(spec, tokens)
    queries, keys, d, f = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.d_model, m.ffn
    inner = tokens * 2 * f + 4 * threads * f  # dH; the gradient of gate and up takes their place row by row
    outer = tokens * (6 * queries + 6 * keys + 4 * queries + 12 * m.heads)  # dO, its codes, dQ, dK, dV in float32
    peak = max(attention + feed_forward + inner, attention + outer)
    if not plan.recompute:
        peak -= attention + feed_forward
    return peak + 4 * tokens * d + _buffers(m, most_slices(spec), tokens, threads) + 2 * f * d


def most_slices(spec: RunSpec) -> int:
    """Slices of an output gradient, on its way to the product that takes more."""
    return max(spec.numerics.input_gradient_slices, spec.numerics.weight_gradient_slices)


def _buffers(m: ModelSpec, slices: int, tokens: int, threads: int) -> int:
    """Buffers that live from product to product: of the head's chunks, and of each thread for its blocks."""
    queries, group, d = m.heads * m.head_dim, m.heads // m.kv_heads, m.d_model
    widest = max(2 * m.ffn, queries, d)
    scores = 16 * max(1 << 19, 32 * group * m.seq_len) + 16 * 768 * m.head_dim
    chunk = 256 * widest * (12 + 4 * slices)
    channels = slices * 128 * (tokens + 4 * widest)
    block = 2 * 512 * tokens + 8 * 512 * (512 + d)
    return threads * (scores + chunk + channels + block) + 13 * max(128 * m.vocab, 1 << 22)


def _head(m: ModelSpec, plan: MemoryPlan, tokens: int, threads: int) -> int:
    """The head's peak: final rows and gradients, its codes unless held, and buffers."""
    codes = 0 if plan.hold_codes else m.vocab * m.d_model
    return tokens * (8 * m.d_model + 64) + codes + _buffers(m, 1, tokens, threads)
