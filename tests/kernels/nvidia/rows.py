"""Inputs of kernels, on both sides, and the comparison of row-wise ones with the reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.interface import Rows, Weight
from kernels.reference.numbers import bf16

F32 = np.float32
KINDS = ("plain", "wild", "tiny", "nonfinite")


def values(seed: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """f32: "wild" spreads from 2⁻¹²⁰ to 2⁶⁰ with zeros, "tiny" has rows about the floor 2⁻⁶⁴, "nonfinite" plants ∞ and
    NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(F32)
    other = rng.integers(0, 181 * 97, shape)
    if kind == "wild":
        x = np.where(other % 11 == 0, F32(0), np.ldexp(x, (other % 181 - 120).astype(np.int32)))
    if kind == "tiny":
        x = np.clip(x, F32(-1), F32(1)) * F32(2.0**-64)
    if kind == "nonfinite":
        x = np.where(other % 97 == 0, F32(np.inf), np.where(other % 97 == 1, F32(np.nan), x))
    return x.astype(F32)


def halves(seed: int, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """The same as bf16 bits, uint16."""
    return bf16(values(seed, shape, kind))


def on_device(x: Any) -> Any:
    """Copies of an array, or of those in a named tuple, as the backend's tensors: bf16 as int16, a weight with its
    transpose; anything else stays."""
    if isinstance(x, Weight):
        return Weight(on_device(x.hi), on_device(x.scale), on_device(x.hi.T))
    if not isinstance(x, np.ndarray):
        return type(x)(*map(on_device, x)) if isinstance(x, tuple) else x
    return torch.from_numpy((x.view(np.int16) if x.dtype == np.uint16 else x).copy())


def same(ours: Callable[..., Any], theirs: Callable[..., Any], *arguments: Any) -> None:
    """Both functions, on their own copies of the arguments: results, and every argument written to, are equal."""
    host = [x.copy() if isinstance(x, np.ndarray) else x for x in arguments]
    device = [on_device(x) for x in arguments]
    with np.errstate(all="ignore"):
        expected, found = theirs(*host), ours(*device)
    assert plain([found, *device]) == plain([expected, *host])


def plain(x: Any) -> Any:
    """Dtype, shape and bytes of every array within; a weight without its layout."""
    if isinstance(x, Weight):
        return plain([x.hi, x.scale])
    if isinstance(x, list | tuple | Rows):
        return [plain(part) for part in x]
    if isinstance(x, Tensor):
        x = x.numpy().view(np.uint16) if x.dtype == torch.int16 else x.numpy()
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x
