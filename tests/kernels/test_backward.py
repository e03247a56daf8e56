"""Each operation's backward against float64 autograd on the dequantised values that its forward saw."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import kernels
from kernels.interface import AttentionShape, GradientSlices, Part, Rope, Rows
from kernels.reference.elementary import normal_cut
from kernels.reference.numbers import bf16, f32
from kernels.reference.philox import words
from tests.model.truth import rotate

EPS = np.float32(1e-5)
TOKENS, WIDTH, OUT = 96, 64, 48


@pytest.fixture(params=kernels.HOSTS)
def b(request: pytest.FixtureRequest) -> ModuleType:
    return kernels.backend(request.param)


def draw(name: str, *shape: int) -> np.ndarray:
    return normal_cut(words(3, name, 0, int(np.prod(shape)))).reshape(shape)


def real(x: np.ndarray, gradient: bool = True) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float64), requires_grad=gradient)


def dequantised(rows: Rows) -> np.ndarray:
    code = rows.hi.astype(np.float64) if rows.lo is None else rows.hi.astype(np.float64) * 256 + rows.lo
    return code * rows.scale.astype(np.float64)[:, None]


def assert_close(got: np.ndarray, expected: Any, tolerance: float) -> None:
    """Relative distance in the Euclidean norm."""
    truth = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    got = np.asarray(got, np.float64)
    distance = np.sqrt(((got - truth) ** 2).sum() / (truth**2).sum())
    assert distance < tolerance, distance


def test_norm(b: ModuleType) -> None:
    x, dy = bf16(draw("x", TOKENS, WIDTH)), bf16(draw("dy", TOKENS, WIDTH))
    gain, flag, sums = draw("gain", WIDTH), b.new_flag(), np.zeros(WIDTH, np.int64)
    rows, r = b.norm_rows(x, gain, EPS, 2, flag)
    dx = b.norm_backward(dy, x, r, gain, None, sums, flag)
    x_t, gain_t = real(f32(x)), real(gain)
    y = x_t / torch.sqrt((x_t * x_t).mean(-1, keepdim=True) + float(EPS)) * gain_t
    y.backward(real(f32(dy), False))
    assert_close(dequantised(rows), y, 1e-4)
    assert_close(f32(dx), x_t.grad, 4e-3)
    assert_close(sums / 2.0**24, gain_t.grad, 1e-5)


@pytest.mark.parametrize(("slices", "tolerance"), [(1, 0.02), (2, 4e-3)])
def test_linear(b: ModuleType, slices: int, tolerance: float) -> None:
    flag = b.new_flag()
    x = b.quantise_rows(bf16(draw("x", TOKENS, WIDTH)), 1, flag)
    dys = [bf16(draw(f"dy{i}", TOKENS, OUT)) for i in range(3)]
    weights = [b.quantise_weight(draw(f"w{i}", OUT, WIDTH), "max", flag) for i in range(3)]
    parts = tuple(Part(dy, w, np.zeros((OUT, WIDTH), np.int64)) for dy, w in zip(dys, weights, strict=True))
    dx = b.linear_backward(x, parts, GradientSlices(slices, slices), flag)
    x_t = real(dequantised(x))
    w_t = [real(dequantised(Rows(w.hi, None, w.scale))) for w in weights]
    for dy, w in zip(dys, w_t, strict=True):
        (x_t @ w.T).backward(real(f32(dy), False))
    assert_close(f32(b.project(x, weights[0])), x_t @ w_t[0].T, 4e-3)
    assert_close(f32(dx), x_t.grad, tolerance)
    for part, w in zip(parts, w_t, strict=True):
        assert_close(part.sums / 2.0**24, w.grad, tolerance)


def test_swiglu(b: ModuleType) -> None:
    gate_up, dh = bf16(draw("gu", TOKENS, 2 * WIDTH) * np.float32(2)), bf16(draw("dh", TOKENS, WIDTH))
    rows = b.swiglu_rows(gate_up, 2, b.new_flag())
    gate, up = (real(part) for part in np.split(f32(gate_up), 2, axis=1))
    h = torch.nn.functional.silu(gate) * up
    h.backward(real(f32(dh), False))
    assert gate.grad is not None and up.grad is not None
    assert_close(dequantised(rows), h, 1e-4)
    assert_close(f32(b.swiglu_backward(dh, gate_up)), torch.cat([gate.grad, up.grad], 1), 4e-3)


def test_rotate(b: ModuleType) -> None:
    heads, width = 3, 32
    angle = np.arange(TOKENS)[:, None] * np.linspace(1, 0.01, width // 2)[None, :]
    rope = Rope(np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    y, dz = bf16(draw("y", TOKENS, heads * width)), draw("dz", TOKENS * heads, width)
    flag = b.new_flag()
    y_t = real(f32(y))
    n = y_t.view(TOKENS, heads, width)
    n = n / torch.sqrt((n * n).mean(-1, keepdim=True) + float(EPS))
    z = rotate(n[None], real(rope.cos, False), real(rope.sin, False))[0].reshape(-1, width)
    z.backward(real(dz, False))
    assert_close(dequantised(b.rotate_rows(y, rope, EPS, False, flag)), z, 0.01)
    query_scale = np.log2(np.e) / np.sqrt(width)
    assert_close(dequantised(b.rotate_rows(y, rope, EPS, True, flag)), z.detach().numpy() * query_scale, 0.01)
    assert_close(f32(b.rotate_backward(dz, y, rope, EPS, flag)), y_t.grad, 4e-3)


@pytest.mark.parametrize("window", [16, TOKENS])
def test_attention(b: ModuleType, window: int) -> None:
    shape = AttentionShape(heads=4, kv_heads=2, width=32, sequence=TOKENS, window=window)
    flag, tokens = b.new_flag(), 2 * TOKENS
    q, k, v = (b.quantise_rows(bf16(draw(n, tokens * h, 32)), 1, flag) for n, h in (("q", 4), ("k", 2), ("v", 2)))
    natural = q
    q = q._replace(scale=q.scale * np.float32(np.log2(np.e) / np.sqrt(32)))
    d_out = bf16(draw("do", tokens, 4 * 32))
    saved = b.attention(q, k, v, shape)
    dq, dk, dv = b.attention_backward(q, k, v, saved, d_out, shape, flag)
    q_t, k_t, v_t = (real(dequantised(x)) for x in (natural, k, v))
    out = _attention_truth(q_t, k_t, v_t, shape)
    out.backward(real(f32(d_out), False))
    assert_close(f32(saved.out), out, 4e-3)
    for got, truth in ((dq, q_t.grad), (dk, k_t.grad), (f32(dv).reshape(-1, 32), v_t.grad)):
        assert_close(got, truth, 6e-3)


def _attention_truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    split = (-1, shape.sequence)
    q, k, v = (x.view(*split, h, shape.width) for x, h in ((q, shape.heads), (k, shape.kv_heads), (v, shape.kv_heads)))
    group = shape.heads // shape.kv_heads
    scores = torch.einsum("bihe,bjhe->bhij", q, k.repeat_interleave(group, 2)) / shape.width**0.5
    distance = torch.arange(shape.sequence)[:, None] - torch.arange(shape.sequence)[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= shape.window), -torch.inf)
    out = torch.einsum("bhij,bjhe->bihe", scores.softmax(-1), v.repeat_interleave(group, 2))
    return out.reshape(-1, shape.heads * shape.width)


def test_head(b: ModuleType) -> None:
    vocab, flag, z = 53, b.new_flag(), 1e-4
    x = b.quantise_rows(bf16(draw("x", TOKENS, WIDTH)), 2, flag)
    w = b.quantise_weight(draw("w", vocab, WIDTH) * np.float32(0.1), "max", flag)
    targets = (words(3, "ids", 0, TOKENS) % np.uint32(vocab)).astype(np.int64)
    sums = np.zeros((vocab, WIDTH), np.int64)
    nll, lse2, dx = b.head_backward(x, w, targets, np.float32(2 * z), sums, flag)
    assert (nll, lse2) == tuple(b.head(x, w, targets, flag))
    x_t, w_t = real(dequantised(x)), real(dequantised(Rows(w.hi, None, w.scale)))
    logits = x_t @ w_t.T
    lse = torch.logsumexp(logits, -1)
    losses = lse - logits[torch.arange(TOKENS), torch.from_numpy(targets)]
    (losses.sum() + z * (lse * lse).sum()).backward()
    truth = np.array([losses.sum().item(), (lse * lse).sum().item()])
    assert_close(np.array([nll / 2.0**24, lse2 / 2.0**20]), truth, 1e-5)
    assert_close(f32(dx), x_t.grad, 4e-3)
    assert_close(sums / 2.0**24, w_t.grad, 6e-3)


def test_embed(b: ModuleType) -> None:
    vocab, flag = 11, b.new_flag()
    ids = (words(3, "ids", 0, TOKENS) % np.uint32(vocab)).astype(np.int64)
    dx, sums = bf16(draw("dx", TOKENS, WIDTH)), np.zeros((vocab, WIDTH), np.int64)
    b.embed_backward(dx, ids, sums, flag)
    table = real(draw("table", vocab, WIDTH))
    table[torch.from_numpy(ids)].backward(real(f32(dx), False))
    assert_close(sums / 2.0**24, table.grad, 1e-5)


def test_adamw_is_the_textbook_update(b: ModuleType) -> None:
    from kernels.interface import AdamScalars

    p, m, v = draw("p", 7, 5), draw("m", 7, 5) * np.float32(0.01), np.square(draw("v", 7, 5)) * np.float32(0.01)
    g = draw("g", 7, 5)
    numbers = dict(
        mean=2.0**-24,
        clip=0.5,
        lr=3e-3,
        decay=0.9997,
        beta1=0.9,
        one_minus_beta1=0.1,
        beta2=0.95,
        one_minus_beta2=0.05,
        correction1=1 / (1 - 0.9**3),
        correction2=1 / (1 - 0.95**3),
        eps=1e-8,
    )
    p64, g64 = p.astype(np.float64), g.astype(np.float64) * 0.5
    m64, v64 = 0.9 * m.astype(np.float64) + 0.1 * g64, 0.95 * v.astype(np.float64) + 0.05 * g64**2
    expected = p64 * 0.9997 - 3e-3 * (m64 / (1 - 0.9**3)) / (np.sqrt(v64 / (1 - 0.95**3)) + 1e-8)
    sums = np.rint(g.astype(np.float64) * 2**24).astype(np.int64)
    b.adamw(p, m, v, sums, AdamScalars(**{key: np.float32(value) for key, value in numbers.items()}))
    for got, truth in ((p, expected), (m, m64), (v, v64)):
        assert_close(got, truth, 1e-6)
    assert abs(b.square_rows(sums, np.float32(2.0**-24))[0] / (g[0].astype(np.float64) ** 2).sum() - 1) < 1e-6
