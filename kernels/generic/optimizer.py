"""Gradient norms and AdamW, element by element, from exact integer sums or an ordered reduction's f32 mean."""

import torch
from torch import Tensor

from kernels.generic.exact import divide, f32_of_i64, magnitude, sqrt
from kernels.generic.numbers import bits_of, fixed_sum
from kernels.interface import AdamScalars

GRADIENT_FLOOR, MOMENT_FLOOR, SQUARE_FLOOR, WEIGHT_FLOOR = (bits_of(2.0**-k) for k in (48, 64, 100, 64))
CHUNK = 1 << 20  # elements at a time: bounds the working memory


def square_rows(sums: Tensor, mean: float) -> Tensor:
    """Σ g² of each row, f32[R], for g = f32(sums)·mean. A vector is one row."""
    rows = sums.reshape(1 if sums.ndim == 1 else len(sums), -1)
    out = torch.empty(len(rows), dtype=torch.float32, device=sums.device)
    size = max(1, CHUNK // rows.shape[1])
    for start in range(0, len(rows), size):
        span = slice(start, start + size)
        g = _f32(rows[span]) * float(mean)
        out[span] = fixed_sum(g * g, torch.zeros(1, dtype=torch.int32, device=sums.device))
    return out


def adamw(p: Tensor, m: Tensor, v: Tensor, sums: Tensor, s: AdamScalars) -> None:
    """One AdamW update, in place. Values below their floors become +0: gradient 2⁻⁴⁸, m and p 2⁻⁶⁴, v 2⁻¹⁰⁰."""
    flat = [x.view(-1) for x in (p, m, v, sums)]
    numbers = {name: float(value) for name, value in s._asdict().items()}
    for start in range(0, p.numel(), CHUNK):
        p_n, m_n, v_n, sums_n = (x[start : start + CHUNK] for x in flat)
        _update(p_n, m_n, v_n, sums_n, numbers)


def _update(p: Tensor, m: Tensor, v: Tensor, sums: Tensor, s: dict[str, float]) -> None:
    g = floor((_f32(sums) * s["mean"]) * s["clip"], GRADIENT_FLOOR)
    m[:] = floor(m * s["beta1"] + g * s["one_minus_beta1"], MOMENT_FLOOR)
    v[:] = floor(v * s["beta2"] + (g * g) * s["one_minus_beta2"], SQUARE_FLOOR)
    update = divide(m * s["correction1"], sqrt(v * s["correction2"]) + s["eps"])
    p[:] = floor(p * s["decay"] - update * s["lr"], WEIGHT_FLOOR)


def _f32(sums: Tensor) -> Tensor:
    """i64 rounded once; f32 as it is."""
    return sums if sums.dtype == torch.float32 else f32_of_i64(sums)


def floor(x: Tensor, smallest: int) -> Tensor:
    """+0 where |x| is below the value of the bits `smallest`."""
    return torch.where(magnitude(x) < smallest, 0.0, x)
