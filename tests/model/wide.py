"""Gradients for tests of the order of sums: float32 of both signs, exponents far and near, so that order matters."""

from __future__ import annotations

import functools

import numpy as np

from model.ordered import Order


@functools.lru_cache(maxsize=4096)
def gradient(rank: int, micro_batch: int, length: int = 67) -> np.ndarray:
    """f32[length]; between ranks an element's exponents lie up to 1, 2, … 40 apart, by its index."""
    random = np.random.default_rng([rank, micro_batch])
    reach = 1 + np.arange(length) % 40
    values = random.uniform(1, 2, length) * random.choice([-1, 1], length)
    found = np.ldexp(values, random.integers(-reach, 1)).astype(np.float32)
    found.flags.writeable = False
    return found


def gradients(order: Order) -> list[list[np.ndarray]]:
    """By rank, then by micro-batch."""
    return [[gradient(rank, index) for index in range(order.micro_batches)] for rank in range(order.world)]
