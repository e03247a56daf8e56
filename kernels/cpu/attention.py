"""Exact attention on CPUs: blocks of queries against only the keys that they may see; no array of sequence × sequence.

The definition is the reference's. The heads of a group share their keys, so a block's queries of all of them make one
product.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernels.cpu import attention_kernels as kernels
from kernels.cpu.exclusive import exclusive
from kernels.cpu.products import multiply, scratch
from kernels.interface import Attended, AttentionShape, Rows

BLOCK_ROWS = 768  # queries · group of a block: enough for a product to run at speed
SHORTEST = 64  # queries of a block at least


class Span(NamedTuple):
    """One window of the unit and one key/value head: where its tokens and its query heads are."""

    tokens: slice
    kv: int
    heads: slice


def spans(tokens: int, shape: AttentionShape) -> Iterator[Span]:
    """Every (window, key/value head) of a unit."""
    group = shape.heads // shape.kv_heads
    for start in range(0, tokens, shape.sequence):
        for kv in range(shape.kv_heads):
            yield Span(slice(start, start + shape.sequence), kv, slice(kv * group, (kv + 1) * group))


def pick(values: np.ndarray, heads: int, tokens: slice, chosen: slice) -> np.ndarray:
    """values [T · heads, …] → [tokens · chosen, …], contiguous, ordered (token, head)."""
    taken = values.reshape(-1, heads, *values.shape[1:])[tokens, chosen]
    return np.ascontiguousarray(taken).reshape(-1, *values.shape[1:])


def query_blocks(shape: AttentionShape) -> Iterator[tuple[slice, slice]]:
    """(queries, keys that any of them sees), in ascending order; at most half a window wide, which wastes little."""
    size = max(1, min(BLOCK_ROWS * shape.kv_heads // shape.heads, max(shape.window // 2, SHORTEST)))
    for a in range(0, shape.sequence, size):
        b = min(a + size, shape.sequence)
        yield slice(a, b), slice(max(a - shape.window + 1, 0), b)


@exclusive
def attention(q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
    """Attention of quantised rows q[T·H, E], k and v[T·K, E]; windows of a unit do not see each other."""
    tokens = len(q.scale) // shape.heads
    out = np.empty((tokens, shape.heads, shape.width), np.uint16)
    peak = np.empty((tokens, shape.heads), np.float32)
    total = np.empty((tokens, shape.heads), np.int32)
    for span in spans(tokens, shape):
        target = (out[span.tokens, span.heads], peak[span.tokens, span.heads], total[span.tokens, span.heads])
        _attend(_Inputs.of(q, k, v, span, shape), shape, *target)
    return Attended(out.reshape(tokens, -1), peak, total)


class _Inputs(NamedTuple):
    """One span's operands, laid out for the products."""

    q: np.ndarray  # int8 [S·group, E]
    q_scale: np.ndarray  # f32 [S·group]
    k: np.ndarray  # int8 [S, E]
    k_scale: np.ndarray  # f32 [S]
    v: np.ndarray  # int8 [S, E]
    v_scale: np.ndarray  # f32 [S]

    @staticmethod
    def of(q: Rows, k: Rows, v: Rows, span: Span, shape: AttentionShape) -> "_Inputs":
        def queries(x: np.ndarray) -> np.ndarray:
            return pick(x, shape.heads, span.tokens, span.heads)

        def keys(x: np.ndarray) -> np.ndarray:
            return pick(x, shape.kv_heads, span.tokens, slice(span.kv, span.kv + 1))

        return _Inputs(queries(q.hi), queries(q.scale), keys(k.hi), keys(k.scale), keys(v.hi), keys(v.scale))


def _attend(x: _Inputs, shape: AttentionShape, out: np.ndarray, peak: np.ndarray, total: np.ndarray) -> None:
    """One span into its parts of out bf16[S, group, E], peak f32[S, group] and total int32[S, group]."""
    group = shape.heads // shape.kv_heads
    top = visible_max(x.v_scale, shape.window)
    product = scratch("attention product", (2, len(x.q), shape.width), np.int32)
    span_peak, span_total = np.empty(len(x.q), np.float32), np.empty(len(x.q), np.int32)
    for block, seen in query_blocks(shape):
        rows = slice(block.start * group, block.stop * group)
        shape_s = (rows.stop - rows.start, seen.stop - seen.start)
        codes = scratch("attention codes", (2, *shape_s), np.int8)
        s = multiply(x.q[rows], x.k[seen].T, scratch("attention s", shape_s, np.int32))
        kernels.weigh_rows(
            s, x.q_scale[rows], x.k_scale[seen], x.v_scale[seen], top[block],
            block.start, seen.start, group, shape.window, codes, span_peak[rows], span_total[rows],
        )  # fmt: skip
        for part in range(2):
            multiply(codes[part], x.v[seen], product[part, rows])
    kernels.output_rows(product, top, span_total, group, out)
    peak[...], total[...] = span_peak.reshape(-1, group), span_total.reshape(-1, group)


def visible_max(scale: np.ndarray, window: int) -> np.ndarray:
    """The largest of scale[max(0, i − window + 1) … i] for each i, by doubling the width of a running maximum."""
    top, width = scale.copy(), 1
    while width < min(window, len(scale)):
        step = min(width, min(window, len(scale)) - width)
        top[step:] = np.maximum(top[step:], top[:-step])
        width += step
    return top
