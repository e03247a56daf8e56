"""Exact int8 products in int32, by the fastest method that proves exact on a device.

`torch._int_mm` saturates on some processors, takes a plain loop on others, and some devices lack it. The other
method is float32 products over slices of at most 1,024 terms, whose partial sums stay within 2²⁴ and so are exact
in any order (also where a device rounds the factors to TF32 or bfloat16, which hold every code). A probe at a
device's first product finds which are exact, and times them.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

MAX_TERMS = 133_144  # beyond it a sum of 127 · 127 leaves int32; one of 128 · 127 beyond 132,104, which no spec allows
SLICE_TERMS = 1024  # 1,024 · 128 · 127 < 2²⁴
SHAPES = ((1, 1, 1), (3, 64, 5), (17, 129, 31), (64, 192, 64), (128, 1025, 48), (5, MAX_TERMS, 3), (33, 4096, 65))
TIMED_SIZE = 256
Method = Callable[[Tensor, Tensor], Tensor]


def integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a int8[R, C] times the transpose of b int8[S, C], as int32[R, S]; raises ValueError beyond 133,144 terms."""
    if a.shape[1] != b.shape[1] or a.shape[1] > MAX_TERMS:
        raise ValueError(
            f"an int8 product of {tuple(a.shape)} and {tuple(b.shape)}: inner sizes must agree, up to {MAX_TERMS}"
        )
    return METHODS[method(a.device)](a, b)


def value(hi: Tensor, lo: Tensor | None, right: Tensor) -> Tensor:
    """f32(hi·right), or f32(hi·right)·2⁸ + f32(lo·right) for two slices."""
    product = integer_product(hi, right).to(torch.float32)
    if lo is None:
        return product
    return product * 256.0 + integer_product(lo, right).to(torch.float32)


def transposed(x: Tensor) -> Tensor:
    """A transposed copy."""
    return x.t().contiguous()


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    rows, terms, columns = _whole(max(a.shape[0], 32)), _whole(a.shape[1]), _whole(b.shape[0])  # what CUDA's asks for
    product = torch._int_mm(_padded(a, rows, terms), _padded(b, columns, terms).t())
    return product[: a.shape[0], : b.shape[0]]


def _whole(size: int) -> int:
    return -(-size // 16) * 16


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    if x.shape == (rows, columns):
        return x.contiguous()
    out = torch.zeros(rows, columns, dtype=x.dtype, device=x.device)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _float32(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int32, device=a.device)
    for start in range(0, a.shape[1], SLICE_TERMS):
        span = slice(start, start + SLICE_TERMS)
        out += (a[:, span].to(torch.float32) @ b[:, span].to(torch.float32).t()).to(torch.int32)
    return out


METHODS: dict[str, Method] = {"int_mm": _int_mm, "float32": _float32}


@cache
def method(device: torch.device) -> str:
    """The fastest of the methods exact on a device. Raises RuntimeError if none is: then it cannot train or audit."""
    names = [name for name, candidate in METHODS.items() if exact(candidate, device)]
    if not names:
        raise RuntimeError(
            f"no int8 product is exact on {device}: audit with another backend, and check this machine's memory"
        )
    return min(names, key=lambda name: _seconds(METHODS[name], device))


def _seconds(candidate: Method, device: torch.device) -> float:
    """What a product of TIMED_SIZE takes until it lies on the host, in seconds: the best of a few."""
    a = torch.ones(TIMED_SIZE, TIMED_SIZE, dtype=torch.int8, device=device)

    def once() -> float:
        began = time.perf_counter()
        candidate(a, a).cpu()
        return time.perf_counter() - began

    return min(once() for _ in range(4))


def exact(candidate: Method, device: torch.device) -> bool:
    """Whether a method exists and is exact where wrong ones fail: extremes, random codes, odd and long shapes."""
    for m, k, n in SHAPES:
        for x, y in ((127, 127), (-127, 127), (-127, -127), (-128, 127)):
            a = torch.full((m, k), x, dtype=torch.int8, device=device)
            b = torch.full((n, k), y, dtype=torch.int8, device=device)
            if k * abs(x * y) < 2**31 and not _agrees(candidate, a, b, torch.full((m, n), k * x * y)):
                return False
        a, b = (_codes(rows, k, seed) for rows, seed in ((m, 1), (n, 2)))
        if not _agrees(candidate, a.to(device), b.to(device), _by_columns(a, b)):
            return False
    return True


def _agrees(candidate: Method, a: Tensor, b: Tensor, expected: Tensor) -> bool:
    try:
        return torch.equal(candidate(a, b).cpu().to(torch.int64), expected.to(torch.int64))
    except (NotImplementedError, RuntimeError):  # this device has no such product, or not for such shapes
        return False


def _codes(rows: int, columns: int, seed: int) -> Tensor:
    """Codes −127…127 that look random: a square's middle bits."""
    index = torch.arange(rows * columns, dtype=torch.int64) + (seed << 20)
    return (((index * index * 40_503) >> 16) % 255 - 127).to(torch.int8).reshape(rows, columns)


def _by_columns(a: Tensor, b: Tensor) -> Tensor:
    """The product in int64, one row of a at a time, on the host."""
    wide = b.to(torch.int64)
    return torch.stack([torch.sum(row.to(torch.int64) * wide, 1, dtype=torch.int64) for row in a])
