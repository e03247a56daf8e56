"""What a piece of work takes of a GPU's memory by the `nvidia` backend, and of the memory of the machine around it.

State, sums, codes, activations and logits all lie on the device, for the whole of a step; nothing is mapped. Of several
processes each has a device, with the state of its own rows, and its sums joined beside the whole ones. As in memory.py
the counts are upper bounds of the backend's arrays, at the point of a unit or step where they are most.
"""

from collections.abc import Iterator

from model.memory import (
    PROGRAM,
    MemoryPlan,
    Needs,
    Piece,
    layer_trace,
    means,
    most_owned,
    most_slices,
    ordered,
    sizes,
    total,
)
from model.spec import ModelSpec, RunSpec
from model.wire import STAGED

# The same numbers as in kernels/nvidia, whose arrays a test counts.
HEAD_BUDGET, HEAD_PART = 24 << 30, 4 << 30  # of the logits and all their codes; of a part of the codes
PAIRS_BUDGET, PAIR = 6 << 30, 8  # of what attention's backward keeps of all pairs of query and key; of one
DIGESTS = 64 * 8 << 20  # scratch memory of the digests of some tensors, or of the largest
PAD = 128  # tokens
WIDEST, WIDEST_HEAD = 16_384, 256  # values of a row that one program holds; channels of a head
CUDA = 2 << 30  # its libraries, in the machine's memory


def too_wide(m: ModelSpec) -> str:
    """Which of a model's sizes no kernel takes, and what is allowed; "" if there is none."""
    rows = {"d_model": m.d_model, "ffn": m.ffn, "heads * head_dim": m.heads * m.head_dim}
    limits = [(name, size, WIDEST) for name, size in rows.items()] + [("head_dim", m.head_dim, WIDEST_HEAD)]
    found = (f"{name} is {size:,}; allowed: up to {limit:,}" for name, size, limit in limits if size > limit)
    return next(found, "")


def on_host(spec: RunSpec, piece: Piece, processes: int = 1) -> int:
    """Bytes of the machine's own memory: a state on its way to or from the device; an audit's gradients beside it; what
    an ordered reduction adds, which is done there, with the sums of a unit. Of several processes the copies of all
    rows, and the whole state that rank 0 gathers of them."""
    words = {"initial": 4, "unit": 4, "training": 12 if processes == 1 else 24, "step": 20}[piece]
    count = sizes(spec.model).parameters
    held = means(spec, processes) if piece in ("training", "step") else 0
    return words * count + processes * ((held + 8 * count if held else 0) + PROGRAM + CUDA)


def needs(spec: RunSpec, plan: MemoryPlan, piece: Piece, processes: int = 1) -> Needs:
    """Purpose → bytes of a process's device at the piece's peak; whether moments are mapped is no matter here."""
    known = sizes(spec.model)
    if piece == "initial":
        found = {"weights": 4 * known.largest, "working space": 1 << 28, "program": PROGRAM}
    else:
        peak: Needs = max(_stages(spec, plan, piece), key=total)
        codes = 2 * known.codes if plan.hold_codes or processes > 1 else 0  # each as it is, and transposed
        own = known.parameters if processes == 1 else most_owned(spec.model, processes)
        moments = 0 if piece == "unit" else 8 * own
        found = {"weights": 4 * own, "moments": moments, "sums": 8 * known.parameters, "codes": codes}
        found |= peak | {"program": PROGRAM}
        if processes > 1:
            found["sums"] += 8 * own  # joined while the whole ones are there, the most of them sent and received
            found["working space"] = max(found["working space"], 24 * min(STAGED["cuda"], known.parameters))
            found["tables"] = 4 * spec.model.vocab * spec.model.d_model
    return ordered(found)


def _stages(spec: RunSpec, plan: MemoryPlan, piece: Piece) -> Iterator[Needs]:
    """Activations and working space where either may be largest: the head, a layer's backward, the step's end."""
    m, tokens, every = spec.model, spec.numerics.unit_windows * spec.model.seq_len, plan.recompute
    stream, trace = 2 * tokens * m.d_model, sum(layer_trace(spec, tokens))
    streams = -(-m.layers // every) if every else 0
    kept = streams * stream if every else m.layers * trace
    again = (every - 2) * stream + trace if every else 0
    yield {"activations": kept, "working space": _head(m, plan, tokens)}
    yield {"activations": kept + again, "working space": _layer(spec, plan, tokens)}
    if piece != "unit":
        squares, digests = 5 * sizes(m).largest, min(DIGESTS, sizes(m).parameters)
        yield {"activations": 0, "working space": squares + digests}


def _head(m: ModelSpec, plan: MemoryPlan, tokens: int) -> int:
    """Logits and the codes of their gradient, all at once or two parts at a time; its input, its output, numbers."""
    logits = 4 * tokens * m.vocab
    codes = logits if 2 * logits <= HEAD_BUDGET else 2 * max(HEAD_PART, 256 * max(m.vocab, tokens))
    own = 0 if plan.hold_codes else 2 * m.vocab * m.d_model
    return logits + codes + own + tokens * (9 * m.d_model + 64) + 16 * m.vocab


def _layer(spec: RunSpec, plan: MemoryPlan, tokens: int) -> int:
    """The peak of one layer's backward, beyond its traces: of its linears, SwiGLU or attention."""
    m, slices = spec.model, most_slices(spec)
    queries, keys, d, f = m.heads * m.head_dim, m.kv_heads * m.head_dim, m.d_model, m.ffn

    def product(inputs: int, outputs: int) -> int:
        """Its output's gradient and the codes of that, its input transposed and the gradient of that; numbers."""
        return tokens * ((2 + 2 * slices) * outputs + 3 * inputs + 32) + 16 * outputs

    padded = spec.numerics.unit_windows * -(-m.seq_len // PAD) * PAD
    outer = tokens * (6 * queries + 6 * keys) + padded * (5 * queries + keys + 36 * m.heads + 24 * m.kv_heads)
    peak = max(
        product(f, d),
        6 * tokens * f,
        product(d, 2 * f),
        product(queries, d),
        outer + _pairs(spec),
        product(d, queries + 2 * keys) + tokens * 4 * (queries + keys),
    )
    widest = 0 if plan.hold_codes else 2 * d * max(2 * f, queries + 2 * keys)
    return peak + widest + 4 * tokens * d + 16 * tokens


def _pairs(spec: RunSpec) -> int:
    """What attention's backward keeps of the pairs of some heads, one group of them at least."""
    m = spec.model
    head = PAIR * (m.seq_len + PAD) ** 2
    return min(spec.numerics.unit_windows * m.heads * head, max(PAIRS_BUDGET, m.heads // m.kv_heads * head))
