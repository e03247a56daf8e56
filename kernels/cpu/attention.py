"""Exact attention on CPUs: blocks of queries against only the keys that they may see; no array of sequence × sequence.

The definition is the reference's. The heads of a group share their keys, so a block's queries of all of them make one
product. A block is one thread's work.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kernels.cpu import attention_kernels as kernels
from kernels.cpu.exclusive import exclusive
from kernels.cpu.pool import spread
from kernels.cpu.products import multiply, scratch
from kernels.interface import Attended, AttentionShape, Rows

BLOCK_PAIRS = 1 << 19  # scores of a block: what is made of them stays near the thread's cache
MOST_ROWS, SHORTEST = 768, 32  # queries · group of a block at most, and queries at least


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
    """(queries, keys that any of them sees), the longest first; at most half a window wide, which wastes little."""
    group = shape.heads // shape.kv_heads
    stop = shape.sequence
    while stop:
        rows = min(MOST_ROWS, BLOCK_PAIRS // min(shape.window, stop))
        start = max(0, stop - max(SHORTEST, min(rows // group, shape.window // 2)))
        yield slice(start, stop), slice(max(start - shape.window + 1, 0), stop)
        stop = start


@exclusive
def attention(q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
    """Attention of quantised rows q[T·H, E], k and v[T·K, E]; windows of a unit do not see each other."""
    tokens = len(q.scale) // shape.heads
    out = np.empty((tokens, shape.heads, shape.width), np.uint16)
    peak = np.empty((tokens, shape.heads), np.float32)
    total = np.empty((tokens, shape.heads), np.int32)
    work = []
    for span in spans(tokens, shape):
        x = _Inputs.of(q, k, v, span, shape)
        top = visible_max(x.v_scale, shape.window)
        target = [array[span.tokens, span.heads] for array in (out, peak, total)]
        for block, seen in query_blocks(shape):
            work.append((x, shape, block, seen, top[block], *(array[block] for array in target)))
    spread(_attend, work)
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


def _attend(
    x: _Inputs,
    shape: AttentionShape,
    block: slice,
    seen: slice,
    top: np.ndarray,
    out: np.ndarray,
    peak: np.ndarray,
    total: np.ndarray,
) -> None:
    """One block of queries into its out bf16[B, group, E], peak f32[B, group] and total int32[B, group]."""
    group = shape.heads // shape.kv_heads
    rows = slice(block.start * group, block.stop * group)
    count = rows.stop - rows.start
    s = multiply(x.q[rows], x.k[seen].T, scratch("attention s", (count, seen.stop - seen.start), np.int32))
    codes = scratch("attention codes", (2, *s.shape), np.int8)
    row_peak, row_total = np.empty(count, np.float32), np.empty(count, np.int32)
    kernels.weigh_rows(
        s, x.q_scale[rows], x.k_scale[seen], x.v_scale[seen], top,
        block.start, seen.start, group, shape.window, codes, row_peak, row_total,
    )  # fmt: skip
    flat = codes.reshape(2 * count, -1)
    product = multiply(flat, x.v[seen], scratch("attention product", (2 * count, shape.width), np.int32))
    kernels.output_rows(product.reshape(2, count, -1), top, row_total, group, out)
    peak[...], total[...] = row_peak.reshape(-1, group), row_total.reshape(-1, group)


def visible_max(scale: np.ndarray, window: int) -> np.ndarray:
    """The largest of scale[max(0, i − window + 1) … i] for each i, by doubling the width of a running maximum."""
    top, width = scale.copy(), 1
    while width < min(window, len(scale)):
        step = min(width, min(window, len(scale)) - width)
        top[step:] = np.maximum(top[step:], top[:-step])
        width += step
    return top
