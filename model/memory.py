"""The memory plan: what a piece of work keeps, what it makes again, and how many bytes that takes, before it starts.

    kept         float32 weights and int64 sums always; int8 codes of all weights, or none
    recomputed   nothing: each layer's trace is kept. n: only the residual stream that enters every n-th layer is; in
                 the backward those n layers' streams are made again, then, from the last to the first, one trace
    mapped       the moments lie in files that the system reads and writes as they are needed

No plan changes a bit: what is recomputed goes through the same functions. The byte counts are of the `cpu` backend:
upper bounds of its arrays and working space, and a measured constant for the program itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from model.spec import ModelSpec, RunSpec

Piece = Literal["unit", "step", "training", "initial"]
PIECES: tuple[Piece, ...] = ("unit", "step", "training", "initial")  # "unit": the gradients of one unit alone
Needs = dict[str, int]  # purpose → bytes, in the order in which a person reads them

PROGRAM = 600 << 20  # interpreter, PyTorch, Numba and the compiled kernels: measured 0.5 GB with all of them in use


@dataclass(frozen=True)
class MemoryPlan:
    """recompute: 0 keeps every layer's trace; n keeps the residual stream entering each n-th layer.

    hold_codes: the int8 codes of all weights are held for the step; else each is made when it is used and dropped.
    map_moments: the optimizer's moments lie in memory-mapped files.
    """

    recompute: int = 0
    hold_codes: bool = True
    map_moments: bool = False

    def slowdown(self) -> float:
        """Rough time of a step relative to keeping everything: a backward costs two forwards. For ordering plans."""
        again = self.recompute and 2 - 1 / self.recompute
        return 1 + again / 3 + (not self.hold_codes) * 0.03 + self.map_moments * 0.05

    def __str__(self) -> str:
        kept = f"the stream entering every {self.recompute}. layer" if self.recompute > 1 else "each layer's input"
        return ", ".join(
            (
                f"keeps {kept if self.recompute else 'every activation'}",
                "all weights' codes held" if self.hold_codes else "weights' codes made when used",
                "moments in files" if self.map_moments else "moments in memory",
            )
        )


KEEP_ALL = MemoryPlan()


def choose(spec: RunSpec, piece: Piece, available: int) -> MemoryPlan | None:
    """The fastest plan with which the piece fits into `available` bytes; None where none does."""
    fitting = (plan for plan in plans(spec.model) if sum(needs(spec, plan, piece).values()) <= available)
    return min(fitting, key=MemoryPlan.slowdown, default=None)


def leanest(spec: RunSpec, piece: Piece) -> MemoryPlan:
    """The plan that takes the least memory."""
    return min(plans(spec.model), key=lambda plan: sum(needs(spec, plan, piece).values()))


def plans(model: ModelSpec) -> Iterator[MemoryPlan]:
    """Every plan that this model can be computed by."""
    for recompute in range(model.layers + 1):
        for hold_codes in (True, False):
            for map_moments in (False, True):
                yield MemoryPlan(recompute, hold_codes, map_moments)


def needs(spec: RunSpec, plan: MemoryPlan, piece: Piece) -> Needs:
    """Purpose → bytes of memory at the piece's peak. Their sum is what must be there; mapped moments are not in it."""
    count = spec.model.parameter_count()
    found = {"weights": 4 * count}
    if piece in ("step", "training"):
        found["moments"] = 0 if plan.map_moments else 8 * count
    if piece != "initial":
        found |= _gradient(spec, plan, piece)
    return found | {"program": PROGRAM}


def on_disk(spec: RunSpec, plan: MemoryPlan, piece: Piece) -> int:
    """Bytes of the files that the moments are mapped from."""
    return 8 * spec.model.parameter_count() * (plan.map_moments and piece in ("step", "training"))


def _gradient(spec: RunSpec, plan: MemoryPlan, piece: Piece) -> Needs:
    model, tokens = spec.model, spec.numerics.unit_windows * spec.model.seq_len
    layer, head = _layer(spec, plan, tokens), _head(model, plan, tokens)
    if piece == "training":
        head = max(head, _diagnostics(model))
    windows = max(phase.windows for phase in spec.schedule.phases) if piece != "unit" else spec.numerics.unit_windows
    return {
        "sums": 8 * model.parameter_count(),
        "codes": sum(2 * o * i + 4 * o for o, i in _linears(model)) if plan.hold_codes else 0,
        "activations": _kept(spec, plan, tokens) + 16 * windows * (model.seq_len + 1),
        "one layer": layer,
        "head, beyond a layer": max(0, head - layer),
    }


def _linears(model: ModelSpec) -> list[tuple[int, int]]:
    """Shapes of the weights that are quantised, the head's included."""
    return [(s[0], s[1]) for name, s in model.shapes().items() if len(s) == 2 and name != "embed"]


def _trace(spec: RunSpec, tokens: int) -> tuple[int, int]:
    """Bytes of one layer's traces: attention's and the feed-forward's."""
    m = spec.model
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    scales = 4 * (4 + 3 * m.heads + 2 * m.kv_heads)
    attention = 3 * m.d_model + 6 * queries + 4 * keys + scales
    return tokens * attention, tokens * (3 * m.d_model + 4 * m.ffn + spec.numerics.down_slices * m.ffn + 12)


def _kept(spec: RunSpec, plan: MemoryPlan, tokens: int) -> int:
    """What every layer, or every n-th, leaves for the backward; with it the streams of n layers made again."""
    layers, every = spec.model.layers, plan.recompute
    if not every:
        return layers * sum(_trace(spec, tokens))
    return (-(-layers // every) + every - 1) * 2 * tokens * spec.model.d_model


def _layer(spec: RunSpec, plan: MemoryPlan, tokens: int) -> int:
    """The peak of one layer's backward, beyond what is kept; its own traces are in it where they are made again."""
    m, traces = spec.model, _trace(spec, tokens)
    queries, keys, d, f = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.d_model, m.ffn
    hidden, gate_up = spec.numerics.down_slices * f, 4 * f
    wide = spec.numerics.gradient_slices
    feed_forward = traces[1] + tokens * max(
        2 * f + max(f, d),  # dH, and the codes of the hidden rows turned
        2 * f + gate_up - hidden,  # dH and the gradient of gate and up
        2 * d + d - hidden,  # that gradient has taken its argument's place; dX, and the codes of X turned
    )
    attention = tokens * (6 * queries + 6 * keys + 4 * d + 12 * m.heads)
    own = traces[0] + max(feed_forward, attention)
    if not plan.recompute:
        own -= sum(traces)
    return own + 4 * tokens * d + _scratch(m, wide, tokens) + 2 * 2 * f * d


def _scratch(m: ModelSpec, slices: int, tokens: int) -> int:
    """Buffers that live from product to product."""
    queries = m.heads * m.head_dim
    widest = max(2 * m.ffn, queries, m.d_model)
    channels = tokens * max(2 * m.ffn, queries, m.d_model) * slices
    weight = 4 * slices * m.d_model * max(2 * m.ffn, queries)
    chunk = 512 * max(1024, widest) * (12 + 5 * slices)
    group = m.heads // m.kv_heads
    scores = 16 * 128 * m.seq_len * group + 6 * 384 * m.seq_len + 20 * m.seq_len * group * m.head_dim
    return channels + weight + chunk + scores


def _head(m: ModelSpec, plan: MemoryPlan, tokens: int) -> int:
    """The head's peak: final rows and gradients, its codes unless held, the logits of a chunk, int32 totals."""
    codes = 0 if plan.hold_codes else 2 * m.vocab * m.d_model
    logits = max(64 * m.vocab, 1 << 21)
    held = 4 * tokens * m.vocab if tokens * m.vocab <= 1 << 25 else 0
    return tokens * 8 * m.d_model + codes + 15 * logits + held + 12 * m.vocab * m.d_model


def _diagnostics(m: ModelSpec) -> int:
    """Squares of a tensor and which of its gradients are zero."""
    return 5 * max(shape[0] * shape[-1] for shape in m.shapes().values() if len(shape) == 2)
