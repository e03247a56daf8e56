"""Numbers of the contract on a torch device: bf16 as bits, maxima on bits, sums of floats as sums of integers.

bf16 tensors are int16 of the same bits: not every device has uint16 or rounds to bfloat16 by itself.
Comparisons with a bound are made on bits, so that a device which takes liberties with NaN or subnormals does
not matter.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.generic.exact import INFINITE, f32_of_i64, from_bits, i64_of_f32, magnitude, power_of_two


def bits_of(value: float) -> int:
    """The float32 bits of a positive host constant."""
    return int(np.float32(value).view(np.int32))


STORE_FLOOR = bits_of(2.0**-100)
ROW_FLOOR = bits_of(2.0**-64)


def constant(value: float | np.float32, like: Tensor) -> Tensor:
    """A float32 scalar tensor on the device of another: no division by or of a host scalar happens."""
    return torch.tensor(float(value), dtype=torch.float32, device=like.device)


def bf16(x: Tensor) -> Tensor:
    """f32 → bf16 bits, nearest even; |x| < 2⁻¹⁰⁰ becomes +0. NaN stays NaN."""
    size = magnitude(x)
    raw = torch.where(size < STORE_FLOOR, 0, x.view(torch.int32))
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16  # arithmetic shift: the sign ends in int16's own
    return torch.where(size > INFINITE, 0x7FC0, rounded).to(torch.int16)


def f32(x: Tensor) -> Tensor:
    """bf16 bits → f32, exact."""
    return from_bits(x.to(torch.int32) << 16)


def raise_flag(flag: Tensor, condition: Tensor) -> None:
    """Set the step's flag if the condition holds anywhere; the host does not wait."""
    flag |= torch.any(condition).to(torch.int32)


def finite(x: Tensor) -> Tensor:
    """x, and 0 where it is not finite."""
    return torch.where(magnitude(x) < INFINITE, x, 0.0)


def finite_max(x: Tensor, flag: Tensor) -> Tensor:
    """The largest |x| of each row as f32; where it is not finite the flag is raised and the maximum counts as 0."""
    top = torch.amax(magnitude(x), 1)
    raise_flag(flag, top >= INFINITE)
    return from_bits(torch.where(top >= INFINITE, 0, top))


def row_max(x: Tensor) -> Tensor:
    """The largest value of each row, f32[R], on integers that compare as the values do: −0 is below +0."""
    return _order_key(torch.amax(_order_key(x), 1).view(torch.float32)).view(torch.float32)


def _order_key(x: Tensor) -> Tensor:
    raw = x.view(torch.int32)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)  # its own inverse


def fixed_sum(x: Tensor, flag: Tensor) -> Tensor:
    """The sum of each row of x f32[R, C], as f32[R]: exact in a fixed point set by the row's maximum, rounded once.

    With 2^E ≤ max|x| < 2^(E+1) and k = min(61 − ⌈log₂ C⌉ − E, 100), Σ rint(x·2^k) stays below 2⁶² in int64.
    A row that is not finite, or whose sum is beyond float32, raises the flag and sums to 0.
    """
    top = finite_max(x, flag).view(torch.int32)
    live = top > 0
    x = torch.where(live[:, None], x, 0.0)
    k = (61 - ceil_log2(x.shape[1]) + 127 - (top >> 23)).clamp(max=100)
    total = torch.sum(i64_of_f32(torch.round(x * power_of_two(k)[:, None])), 1, dtype=torch.int64)
    result = torch.where(live, f32_of_i64(total) * power_of_two(-k), 0.0)
    raise_flag(flag, magnitude(result) >= INFINITE)
    return finite(result)


def fixed_point(x: Tensor, scale_bits: int, flag: Tensor, terms: int, limit: int) -> Tensor:
    """rint(x · 2^scale_bits) as int64. Where |x| · terms ≥ 2^limit or x is not finite: the flag, and 0."""
    bad = magnitude(x * float(terms)) >= bits_of(2.0**limit)
    raise_flag(flag, bad)
    return i64_of_f32(torch.round(torch.where(bad, 0.0, x) * 2.0**scale_bits))


def ceil_log2(n: int) -> int:
    """⌈log₂ n⌉ for n ≥ 1."""
    return (n - 1).bit_length()


def add_rows(sums: Tensor, index: Tensor, values: Tensor) -> None:
    """sums[index[t]] += values[t] for int64 rows, where an index may repeat.

    Rows of one index are added in pairs, then pairs of pairs, since not every device can scatter int64.
    """
    order = torch.sort(index.to(torch.int32), stable=True).indices
    found, counts = np.unique(index.cpu().numpy(), return_counts=True)
    starts = np.cumsum(counts, dtype=np.int64) - counts
    rank = np.arange(len(index)) - np.repeat(starts, counts)
    length = np.repeat(counts, counts)
    rows, step = values.index_select(0, order), 1
    while step < counts.max():
        left = _on(np.flatnonzero((rank % (2 * step) == 0) & (rank + step < length)), sums)
        rows[left] = rows.index_select(0, left) + rows.index_select(0, left + step)
        step *= 2
    place = _on(found, sums)
    sums[place] = sums.index_select(0, place) + rows.index_select(0, _on(starts, sums))


def _on(index: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(index.astype(np.int64)).to(like.device)
