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

BLOCK_ROWS = 384  # queries · group of a block


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
    """(queries, keys that any of them sees), in ascending order."""
    size = max(1, BLOCK_ROWS * shape.kv_heads // shape.heads)
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
    k_columns: np.ndarray  # int8 [E, S]
    k_scale: np.ndarray  # f32 [S]
    v: np.ndarray  # int8 [S, E]
    v_scale: np.ndarray  # f32 [S]

    @staticmethod
    def of(q: Rows, k: Rows, v: Rows, span: Span, shape: AttentionShape) -> "_Inputs":
        def queries(x: np.ndarray) -> np.ndarray:
            return pick(x, shape.heads, span.tokens, span.heads)

        def keys(x: np.ndarray) -> np.ndarray:
            return pick(x, shape.kv_heads, span.tokens, slice(span.kv, span.kv + 1))

        columns = np.ascontiguousarray(keys(k.hi).T)
        return _Inputs(queries(q.hi), queries(q.scale), columns, keys(k.scale), keys(v.hi), keys(v.scale))


def _attend(x: _Inputs, shape: AttentionShape, out: np.ndarray, peak: np.ndarray, total: np.ndarray) -> None:
    """One span into its parts of out bf16[S, group, E], peak f32[S, group] and total int32[S, group]."""
    group = shape.heads // shape.kv_heads
    top = visible_max(x.v_scale, shape.window)
    for block, seen in query_blocks(shape):
        rows, keys = slice(block.start * group, block.stop * group), seen.stop - seen.start
        count = rows.stop - rows.start
        s = scratch("attention s", (count, keys), np.int32)
        codes = scratch("attention codes", (2 * count, keys), np.int8)
        product = scratch("attention product", (2 * count, shape.width), np.int32)
        block_peak, block_total = np.empty(count, np.float32), np.empty(count, np.int32)
        multiply(x.q[rows], x.k_columns[:, seen], s)
        kernels.weigh_rows(
            s, x.q_scale[rows], x.k_scale[seen], x.v_scale[seen], top[block],
            block.start, seen.start, group, shape.window, codes, block_peak, block_total,
        )  # fmt: skip
        multiply(codes, x.v[seen], product)
        kernels.output_rows(product, top[block], block_total, group, out[block])
        peak[block], total[block] = block_peak.reshape(-1, group), block_total.reshape(-1, group)


def visible_max(scale: np.ndarray, window: int) -> np.ndarray:
    """The largest of scale[max(0, i − window + 1) … i] for each i, by doubling the width of a running maximum."""
    top, width = scale.copy(), 1
    while width < min(window, len(scale)):
        step = min(width, min(window, len(scale)) - width)
        top[step:] = np.maximum(top[step:], top[:-step])
        width += step
    return top
