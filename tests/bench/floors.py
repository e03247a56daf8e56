"""How far each operation of the CPU backend is from its floor.

The floor of an operation is the time that its integer products take at the rate of this machine's best large product,
plus the time that its operands and results take to be moved once at the rate of a large copy. What an operation does
beyond that (scores made twice, intermediate codes, element-wise work outside the cache) is in the ratio.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

import kernels
import kernels.digest
from kernels.cpu import products
from kernels.interface import AdamScalars, AttentionShape, GradientSlices, Part, Rope, Rows
from model import host
from tests.bench.shapes import TOKENS, spec

REPEATS = 5
F32 = np.float32


class Operation(NamedTuple):
    """One call: what it does at least, in operations of integer products (a multiplication and an addition are two)
    and bytes."""

    name: str
    call: Callable[[], object]
    operations: float
    size: float


def best_seconds(call: Callable[[], object]) -> float:
    """The fastest of a few calls, after one that warms up."""
    call()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def peaks() -> tuple[float, float]:
    """(operations a second of a large int8 product, bytes a second read and written by a large copy)."""
    n = 4096
    a, b, out = np.ones((n, n), np.int8), np.ones((n, n), np.int8), np.empty((n, n), np.int32)
    source, target = torch.zeros(1 << 26), torch.zeros(1 << 26)
    return 2 * n**3 / best_seconds(lambda: products.multiply(a, b, out)), 2 * source.nbytes / best_seconds(
        lambda: target.copy_(source)
    )


def measure(size: str) -> list[dict[str, Any]]:
    """A row for each operation at the shapes of a model; prints them as Markdown."""
    rate, bandwidth = peaks()
    print(f"\nPeak of products {rate / 1e9:.0f} GOPS, of copies {bandwidth / 1e9:.1f} GB/s.\n")
    print("| operation | ms | floor ms | × floor |\n|---|---|---|---|")
    rows = []
    for name, call, operations, moved in [*_layer(size), *_attention(size), *_rest(size)]:
        seconds, floor = best_seconds(call), operations / rate + moved / bandwidth
        rows.append({"operation": name, "seconds": seconds, "floor_seconds": floor})
        print(f"| {name} | {seconds * 1e3:.1f} | {floor * 1e3:.1f} | {seconds / floor:.1f} |", flush=True)
    return rows


def _bf16(*shape: int) -> np.ndarray:
    draw = np.random.default_rng(0).standard_normal(shape, np.float32)
    return (draw.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32) * F32(0.02)


def _layer(size: str) -> list[Operation]:
    """Norm, feed-forward and their backward."""
    b, m, t = kernels.backend("cpu"), spec(size).model, TOKENS
    d, f, flag, eps = m.d_model, m.ffn, b.new_flag(), F32(1e-5)
    x, gain, dy, hidden = _bf16(t, d), np.ones(d, F32), _bf16(t, 2 * f), _bf16(t, 2 * f)
    w, w_down = (b.quantise_weight(_f32(*shape), "max", flag) for shape in ((2 * f, d), (d, f)))
    rows, r = b.norm_rows(x, gain, eps, 1, flag)
    h, sums, gains = b.swiglu_rows(hidden, 1, flag), b.new_sums((2 * f, d)), b.new_sums((d,))
    part, plain = Part(dy, w, sums), _f32(2 * f, d)
    product = 2 * t * d * 2 * f
    return [
        Operation("quantise_weight", lambda: b.quantise_weight(plain, "max", flag), 0, 5 * 2 * f * d),
        Operation("norm_rows", lambda: b.norm_rows(x, gain, eps, 1, flag), 0, 3 * t * d),
        Operation("norm_backward", lambda: b.norm_backward(x, x, r, gain, x, gains, flag), 0, 8 * t * d),
        Operation("project gate_up", lambda: b.project(rows, w), product, t * d + 2 * f * d + 4 * t * f),
        Operation("swiglu_rows", lambda: b.swiglu_rows(hidden, 1, flag), 0, 5 * t * f),
        Operation("project_add down", lambda: b.project_add(h, w_down, x), product / 2, t * f + d * f + 4 * t * d),
        Operation("swiglu_backward", lambda: b.swiglu_backward(hidden[:, :f].copy(), hidden.copy()), 0, 10 * t * f),
        Operation(
            "linear_backward gate_up",
            lambda: b.linear_backward(rows, (part,), GradientSlices(1, 1), flag),
            2 * product,
            4 * t * f + 3 * t * d + 17 * 2 * f * d,
        ),
    ]


def _attention(size: str) -> list[Operation]:
    """Rotation and attention, of a local and of a full layer."""
    b, m, t = kernels.backend("cpu"), spec(size).model, TOKENS
    flag, eps, width = b.new_flag(), F32(1e-5), m.heads * m.head_dim
    rope = Rope(*host.rope_tables(t, m.head_dim, m.rope_theta))
    y, dz = _bf16(t, width), _f32(t * m.heads, m.head_dim)
    q = b.rotate_rows(y, rope, eps, True, flag)
    k, v = (Rows(x.hi.copy(), None, x.scale) for x in [b.quantise_rows(_bf16(t * m.kv_heads, m.head_dim), 1, flag)] * 2)
    found = [
        Operation("rotate_rows", lambda: b.rotate_rows(y, rope, eps, True, flag), 0, 3 * t * width),
        Operation("rotate_backward", lambda: b.rotate_backward(dz, y, rope, eps, flag), 0, 8 * t * width),
    ]
    for name, window in (("local", m.window), ("full", t)):
        shape = AttentionShape(m.heads, m.kv_heads, m.head_dim, t, window)
        pairs = m.heads * (t * window - window * (window - 1) // 2)
        out = b.attention(q, k, v, shape)

        def forward(shape: AttentionShape = shape) -> object:
            return b.attention(q, k, v, shape)

        def backward(shape: AttentionShape = shape, out: Any = out) -> object:
            return b.attention_backward(q, k, v, out, y, shape, flag)

        found += [
            Operation(f"attention, {name}", forward, 3 * 2 * m.head_dim * pairs, 3 * t * width),
            Operation(f"attention_backward, {name}", backward, 10 * 2 * m.head_dim * pairs, 11 * t * width),
        ]
    return found


def _rest(size: str) -> list[Operation]:
    """Embedding, head, norm of the gradient, AdamW, digests."""
    b, m, t = kernels.backend("cpu"), spec(size).model, TOKENS
    flag, (v, d), backward = b.new_flag(), (m.vocab, m.d_model), 6 * 2 * t * m.vocab * m.d_model
    x = b.quantise_rows(_bf16(t, d), 2, flag)
    w, tokens, sums = b.quantise_weight(_f32(v, d), "max", flag), np.arange(t) * 7 % v, b.new_sums((v, d))
    dx, tensors, scalars = _bf16(t, d), [_f32(v, d) for _ in range(3)], AdamScalars(*(F32(0.5),) * 11)

    def state_digest() -> None:
        for tensor in tensors:
            kernels.digest.tensor_digest("t", tensor)

    return [
        Operation("head", lambda: b.head(x, w, tokens, flag), backward / 3, v * d + 2 * t * d),
        Operation(
            "head_backward",
            lambda: b.head_backward(x, w, tokens, F32(2e-4), sums, flag),
            backward,
            17 * v * d + 4 * t * d,
        ),
        Operation("embed_backward", lambda: b.embed_backward(dx, tokens, sums, flag), 0, 18 * t * d),
        Operation("square_rows", lambda: b.square_rows(sums, F32(1e-9)), 0, 8 * v * d),
        Operation("adamw", lambda: b.adamw(*tensors, sums, scalars), 0, 32 * v * d),
        Operation("digests of the state", state_digest, 0, 12 * v * d),
    ]
