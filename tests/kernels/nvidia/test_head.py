"""The output head on NVIDIA processors against the reference, byte for byte, in Triton's interpreter."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.interface import INT16_MAX, Rows, Weight
from kernels.reference.elementary import normal_cut
from kernels.reference.numbers import bf16
from kernels.reference.philox import words
from tests.kernels.nvidia.rows import F32, on_device

module = import_module("kernels.nvidia.head")  # its name in the package is the function's


def floats(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers, cut."""
    return normal_cut(words(7, name, 0, int(np.prod(shape)))).reshape(shape)


def inputs(tokens: int, width: int, vocab: int, slices: int = 2) -> tuple[Rows, Weight, np.ndarray]:
    """Rows, weight and targets, which hold both edges of the vocabulary and repeat."""
    flag = reference.new_flag()
    x = reference.quantise_rows(bf16(floats("x", tokens, width)), slices, flag)
    w = reference.quantise_weight(floats("w", vocab, width), "max", flag)
    targets = (words(1, "y", 0, tokens) % np.uint32(vocab)).astype(np.int64)
    targets[: tokens // 3], targets[tokens // 3 : tokens // 2] = vocab - 1, 0
    return x, w, targets


def compare(x: Rows, w: Weight, targets: np.ndarray, two_z: float = 2e-4) -> int:
    """Assert that losses, dX, sums and flag have the reference's bytes, from head and head_backward; the flag."""
    shape = (len(w.scale), x.hi.shape[1])
    start = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape) << 20
    flags, sums = np.zeros((2, 1), np.int32), start.copy()
    with np.errstate(all="ignore"):
        losses = reference.head(x, w, targets, flags[0])
        *again, dx = reference.head_backward(x, w, targets, F32(two_z), sums, flags[1])
        rows, weight, y = map(on_device, (x, w, targets))
        own_flags, own_sums = torch.zeros(2, 1, dtype=torch.int32), torch.from_numpy(start)
        own = module.head(rows, weight, y, own_flags[0])
        *own_again, own_dx = module.head_backward(rows, weight, y, F32(two_z), own_sums, own_flags[1])
    for result in (*own, *own_again):
        assert result.dtype == torch.int64 and result.shape == ()
    assert [int(v) for v in (*own, *own_again)] == [*losses, *again]
    assert own_flags.numpy().tolist() == flags.tolist()
    assert own_dx.numpy().tobytes() == dx.tobytes()
    assert own_sums.numpy().tobytes() == sums.tobytes()
    return int(flags[1, 0])


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (2, 200, 7, 2), (17, 129, 257, 2), (9, 128, 256, 1)])
def test_the_reference_s_bytes(size: tuple[int, int, int, int]) -> None:
    assert compare(*inputs(*size)) == 0


def test_logits_over_the_whole_range() -> None:
    """Scales that spread logits over 2⁴⁰: most exponentials are 0, and lse² is beyond its limit."""
    x, w, y = inputs(5, 33, 129)
    assert compare(x._replace(scale=x.scale * F32(2.0**40)), w, y) == 1


@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    x, w, y = inputs(5, 33, 129)
    assert compare(x, w._replace(scale=w.scale * F32(value)), y) == 1
    scale = x.scale.copy()
    scale[3] = value
    assert compare(x._replace(scale=scale), w, y) == 1
    scale = w.scale.copy()
    scale[128] = value
    assert compare(x, w._replace(scale=scale), y) == 1


def test_one_logit_that_is_not_finite_voids_its_token_alone() -> None:
    x, w, y = inputs(5, 3, 9)
    x.hi[2], x.lo[2], w.hi[4] = (127, 0, 0), 0, 0
    w.hi[4, 0] = 127
    w.scale[4], x.scale[2] = F32(2.0**100), F32(2.0**100)
    x.hi[[0, 1, 3, 4], 0], x.lo[:, 0] = 0, 0
    assert compare(x, w, y) == 1


@pytest.mark.parametrize(("reach", "two_z", "flag"), [(0.9, 0.0, 0), (1.8, 0.0, 1), (0.9, 1.0, 1)])
def test_limits_of_the_weight_s_gradient(reach: float, two_z: float, flag: int) -> None:
    """The target's part reaches `reach` · 2²⁶, the softmax's half of it times 1 + 2z·lse."""
    tokens, width, vocab = 3, 9, 2
    code = np.full((tokens, width), 127, np.int8)
    scale = np.full(tokens, F32(reach) * F32(2.0**26) / F32(tokens * INT16_MAX), F32)
    w = reference.quantise_weight(np.full((vocab, width), 2.0**-27, F32), "max", reference.new_flag())
    assert compare(Rows(code, np.zeros_like(code), scale), w, np.zeros(tokens, np.int64), two_z) == flag


@pytest.mark.parametrize(("scale", "flag"), [(2.0**-90, 0), (0.0, 0), (2.0**20, 1)])
def test_losses_at_their_limits(scale: float, flag: int) -> None:
    """Logits that are all 0 or far below it, and an nll or lse² that no fixed point holds."""
    x, w, y = inputs(9, 17, 33)
    assert compare(x._replace(scale=x.scale * F32(scale)), w, y) == flag


@pytest.mark.parametrize(("codes", "logit", "flag"), [((0, -1), 2.0**26, 0), ((0, -1), 2.0**27, 1), ((1, 1), 60e3, 1)])
def test_each_loss_has_its_limit(codes: tuple[int, int], logit: float, flag: int) -> None:
    """An nll of 2²⁷ whose lse is 0, and an lse² above 2³¹ whose nll is small; two_z = 0 keeps the gradients small."""
    x = Rows(np.ones((1, 1), np.int8), np.zeros((1, 1), np.int8), np.full(1, 2.0**-8, F32))
    w = Weight(np.array(codes, np.int8)[:, None], np.full(2, logit, F32))
    assert compare(x, w, np.ones(1, np.int64), 0.0) == flag


def test_exponentials_are_rounded_not_cut() -> None:
    """255 of them at 257.75 · 2⁻⁴⁰ beside a 1: rounded, their sum is more than half a step of 2⁴⁰; cut, less."""
    x = Rows(np.ones((1, 1), np.int8), np.zeros((1, 1), np.int8), np.full(1, 22.173896 / 256, F32))
    w = Weight(np.full((256, 1), -1, np.int8), np.ones(256, F32))
    w.hi[0] = 0
    assert compare(x, w, np.zeros(1, np.int64)) == 0


def test_no_chunk_and_no_tile_reaches_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles; codes in parts of tokens and of the vocabulary, losses in parts of tokens."""
    x, w, y = inputs(12, 40, 28)
    small = {"GROUP": 2, "M": 8, "N": 16, "K": 32}
    tiles = {"LOGITS": small, "INPUT": small, "WEIGHT": small, "LOSSES": {"BLOCK": 16}, "SCALES": {"BLOCK": 32}}
    tiles |= {"TOPS": {"STEPS": 2, "R": 4, "C": 16}, "CODES": {"R": 4, "C": 8}, "TARGET": {"BLOCK": 16}}
    for name, tile in tiles.items():
        monkeypatch.setattr(module, name, tile)
    assert compare(x, w, y) == 0
    parts: list[Any] = []
    codes = module._codes
    monkeypatch.setattr(module, "_codes", lambda *a: parts.append(a[-2:]) or codes(*a))
    for name, value in (("BUDGET", 1), ("PART", 1), ("LOSS_LOGITS", 1), ("WHOLE", 8)):
        monkeypatch.setattr(module, name, value)
    assert compare(x, w, y) == 0
    assert parts[:2] == [(slice(0, 8), None), (slice(8, 12), None)]
    assert parts[2:] == [(None, slice(start, min(start + 8, 28))) for start in range(0, 28, 8)]
