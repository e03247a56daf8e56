"""Initial weights by Philox4x32-10 in int64 operations: word i of (seed, "weights/" + name) makes element i."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from kernels.generic.elementary import normal_cut

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
CHUNK_BLOCKS = 1 << 18  # bounds the working memory


def initial_weights(device: torch.device, seed: int, name: str, shape: tuple[int, ...], std: np.float32) -> Tensor:
    """f32[shape]: the standard normal cut at ±2σ, times std."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; a seed is an integer from 0 to 2^64 - 1")
    count = math.prod(shape)
    tag = hashlib.blake2s(f"weights/{name}".encode(), digest_size=8).digest()
    words = (int.from_bytes(tag[:4], "little"), int.from_bytes(tag[4:], "little"))
    out = torch.empty(count, dtype=torch.float32, device=device)
    for first in range(0, count, 4 * CHUNK_BLOCKS):
        stop = min(count, first + 4 * CHUNK_BLOCKS)
        block = torch.arange(first // 4, (stop + 3) // 4, dtype=torch.int64, device=device)
        drawn = _philox(block, words, (seed & LOW, seed >> 32)).reshape(-1)[: stop - first]
        out[first:stop] = normal_cut(drawn) * float(std)
    return out.reshape(shape)


def _philox(block: Tensor, tag: tuple[int, int], key: tuple[int, int]) -> Tensor:
    """Words [N, 4], int64 of 32 bits each, of the blocks numbered i64[N]."""
    c0, c1 = block & LOW, block >> 32
    c2, c3 = torch.full_like(c0, tag[0]), torch.full_like(c0, tag[1])
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = _multiply(c0, MULTIPLIERS[0]), _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return torch.stack((c0, c1, c2, c3), 1)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product of 32-bit numbers, of which int64 could not hold all 64."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)
    rest = lower + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (rest >> 32), rest & LOW
