"""Exact attention in blocks: causal, grouped heads, full or windowed, forward and backward.

Forward and dQ work on a block of queries with all keys that it sees, so that every row is whole; dK and dV on a
block of keys with all queries that see it, so that every column is whole. The queries of a KV head's group are
rows of one matrix: row = query · group + head. A local layer does only its window's work.

    B queries or keys of a block   G heads of a group   S keys or queries of its span   E head width
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.generic.elementary import LN_2, exp2
from kernels.generic.exact import divide
from kernels.generic.layers import inverse_root
from kernels.generic.numbers import bf16, constant, f32, fixed_sum, row_max
from kernels.generic.products import integer_product, transposed, value
from kernels.generic.quantise import quantise, quantise_columns, reciprocal, scale_and_inverse, split
from kernels.interface import INT16_MAX, Attended, AttentionShape, Rows

UNIT = reciprocal(INT16_MAX)
CHUNK = 1 << 21  # scores at a time: bounds the working memory


class Block(NamedTuple):
    """Queries and keys that meet: one window, one KV head."""

    window: int
    kv: int
    heads: slice
    queries: slice
    keys: slice


def attention(q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
    """Attention of quantised rows q[T·H, E], k and v[T·K, E]; windows of a unit do not see each other."""
    tokens, device = len(q.scale) // shape.heads, q.scale.device
    out = torch.empty(tokens, shape.heads, shape.width, dtype=torch.int16, device=device)
    peak = torch.empty(tokens, shape.heads, dtype=torch.float32, device=device)
    total = torch.empty(tokens, shape.heads, dtype=torch.int32, device=device)
    for block in _query_blocks(tokens, shape):
        q_b, k_b, v_b = _queries(q, block, shape), _keys(k, block, shape), _keys(v, block, shape)
        seen = _seen(block, shape, device)
        s = _scores(q_b, k_b)
        m = row_max(torch.where(seen, s, -torch.inf))
        p = torch.where(seen, exp2((s - m[:, None]).clamp_(max=0.0)), 0.0)
        count = torch.sum(torch.round(p * 2.0**18).to(torch.int32), 1, dtype=torch.int64).to(torch.int32)
        top = row_max(torch.where(seen, v_b.scale[None, :], 0.0))
        hi, lo = split((p * v_b.scale[None, :]) * scale_and_inverse(top, 2)[1][:, None], constant(1, p), 2)
        factor = divide(top * UNIT, count.to(torch.float32) * 2.0**-18)
        _place(out, block, shape, bf16(value(hi, lo, transposed(v_b.hi)) * factor[:, None]))
        _place(peak, block, shape, m)
        _place(total, block, shape, count)
    return Attended(out.reshape(tokens, -1), peak, total)


def attention_backward(
    q: Rows, k: Rows, v: Rows, saved: Attended, d_out: Tensor, shape: AttentionShape, flag: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq f32[T·H, E], dk f32[T·K, E], dv bf16[T, K·E]) of the dequantised q, k and v, from d_out bf16[T, H·E]."""
    tokens, device = len(q.scale) // shape.heads, q.scale.device
    dq = torch.empty(tokens, shape.heads, shape.width, dtype=torch.float32, device=device)
    dk = torch.empty(tokens, shape.kv_heads, shape.width, dtype=torch.float32, device=device)
    dv = torch.empty(tokens, shape.kv_heads, shape.width, dtype=torch.int16, device=device)
    d = quantise(f32(d_out).reshape(-1, shape.width), 2, flag)
    delta = fixed_sum((f32(d_out) * f32(saved.out)).reshape(-1, shape.width), flag)
    given = (q, k, v, d, delta, saved, shape)
    for block in _query_blocks(tokens, shape):
        k_b = _keys(k, block, shape)
        _, ds, _, _ = _probabilities_and_gradient(block, *given)
        left = quantise(ds * k_b.scale[None, :], 2, flag)
        factor = left.scale * float(inverse_root(shape.width))
        _place(dq, block, shape, value(left.hi, left.lo, transposed(k_b.hi)) * factor[:, None])
    for block in _key_blocks(tokens, shape):
        p, ds, q_b, d_b = _probabilities_and_gradient(block, *given)
        span = slice(block.window * shape.sequence + block.keys.start, block.window * shape.sequence + block.keys.stop)
        dk[span, block.kv] = _key_gradient(ds * q_b.scale[:, None], q_b, flag)
        dv[span, block.kv] = _value_gradient(p * d_b.scale[:, None], d_b, flag)
    return dq.reshape(-1, shape.width), dk.reshape(-1, shape.width), dv.reshape(tokens, -1)


def _probabilities_and_gradient(
    block: Block, q: Rows, k: Rows, v: Rows, d: Rows, delta: Tensor, saved: Attended, shape: AttentionShape
) -> tuple[Tensor, Tensor, Rows, Rows]:
    """(P, dS = P·(dP − Σ dO·O), the block's q and dO), f32[B·G, S]; 0 where a key is not seen."""
    q_b, d_b = (_queries(x, block, shape) for x in (q, d))
    k_b, v_b = (_keys(x, block, shape) for x in (k, v))
    peak, total, delta = (_by_query(x.reshape(-1), block, shape) for x in (saved.peak, saved.total, delta))
    seen = _seen(block, shape, delta.device)
    inverse = divide(constant(1, delta), total.to(torch.float32) * 2.0**-18)
    p = exp2((_scores(q_b, k_b) - peak[:, None]).clamp_(max=0.0)) * inverse[:, None]
    p = torch.where(seen, p, 0.0)
    dp = (value(d_b.hi, d_b.lo, v_b.hi) * d_b.scale[:, None]) * v_b.scale[None, :]
    ds = torch.where(seen, p * (dp - delta[:, None]), 0.0)  # dP of a key that is not seen may be infinite
    return p, ds, q_b, d_b


def _key_gradient(left: Tensor, q: Rows, flag: Tensor) -> Tensor:
    columns = quantise_columns(left, 2, flag)
    return value(columns.hi, columns.lo, transposed(q.hi)) * (columns.scale * LN_2)[:, None]


def _value_gradient(left: Tensor, d: Rows, flag: Tensor) -> Tensor:
    """Contracts the columns of P·s_dO with both slices of dO; the product of the two low slices is dropped."""
    columns = quantise_columns(left, 2, flag)
    d_hi, d_lo = transposed(d.hi), transposed(d.lo)
    cross = integer_product(columns.hi, d_lo) + integer_product(columns.lo, d_hi)
    both = integer_product(columns.hi, d_hi).to(torch.float32) * 256.0 + cross.to(torch.float32)
    return bf16(both * (columns.scale * 256.0)[:, None])


def _scores(q: Rows, k: Rows) -> Tensor:
    return (integer_product(q.hi, k.hi).to(torch.float32) * q.scale[:, None]) * k.scale[None, :]


def _query_blocks(tokens: int, shape: AttentionShape) -> Iterator[Block]:
    for window, kv, heads, size in _groups(tokens, shape):
        for start in range(0, shape.sequence, size):
            stop = min(start + size, shape.sequence)
            yield Block(window, kv, heads, slice(start, stop), slice(max(0, start - shape.window + 1), stop))


def _key_blocks(tokens: int, shape: AttentionShape) -> Iterator[Block]:
    for window, kv, heads, size in _groups(tokens, shape):
        for start in range(0, shape.sequence, size):
            stop = min(start + size, shape.sequence)
            last = min(shape.sequence, stop - 1 + shape.window)
            yield Block(window, kv, heads, slice(start, last), slice(start, stop))


def _groups(tokens: int, shape: AttentionShape) -> Iterator[tuple[int, int, slice, int]]:
    """(window, KV head, its query heads, size of a block) for each window and KV head."""
    group = shape.heads // shape.kv_heads
    size = max(32, CHUNK // (group * min(shape.sequence, 2 * shape.window)) // 32 * 32)
    for window in range(tokens // shape.sequence):
        for kv in range(shape.kv_heads):
            yield window, kv, slice(kv * group, (kv + 1) * group), size


def _seen(block: Block, shape: AttentionShape, device: torch.device) -> Tensor:
    """Which keys each row sees: bool[B·G, S]."""
    query = torch.arange(block.queries.start, block.queries.stop, device=device)
    key = torch.arange(block.keys.start, block.keys.stop, device=device)
    distance = query.repeat_interleave(shape.heads // shape.kv_heads)[:, None] - key[None, :]
    return (distance >= 0) & (distance < shape.window)


def _by_query(x: Tensor, block: Block, shape: AttentionShape) -> Tensor:
    """The block's rows [B·G, …] of x [T·H, …]."""
    rows = x.reshape(-1, shape.sequence, shape.heads, *x.shape[1:])
    return rows[block.window, block.queries, block.heads].reshape(-1, *x.shape[1:])


def _queries(x: Rows, block: Block, shape: AttentionShape) -> Rows:
    hi, scale = _by_query(x.hi, block, shape), _by_query(x.scale, block, shape)
    return Rows(hi, None if x.lo is None else _by_query(x.lo, block, shape), scale)


def _keys(x: Rows, block: Block, shape: AttentionShape) -> Rows:
    place = (block.window, block.keys, block.kv)
    hi = x.hi.reshape(-1, shape.sequence, shape.kv_heads, shape.width)[place]
    return Rows(hi, None, x.scale.reshape(-1, shape.sequence, shape.kv_heads)[place].contiguous())


def _place(out: Tensor, block: Block, shape: AttentionShape, rows: Tensor) -> None:
    """Write the block's rows [B·G, …] into out [T, H, …]."""
    target = out.view(-1, shape.sequence, shape.heads, *out.shape[2:])[block.window, block.queries, block.heads]
    target[...] = rows.reshape(target.shape)
