"""Initial weights: each a pure function of (seed, parameter name, its index)."""

import math

import numpy as np

from kernels.reference.elementary import normal_cut
from kernels.reference.philox import words


def initial_weights(seed: int, name: str, shape: tuple[int, ...], std: np.float32) -> np.ndarray:
    """f32[shape]: the standard normal cut at ±2σ, times std. Element i comes from word i of ("weights/" + name)."""
    return (normal_cut(words(seed, f"weights/{name}", 0, math.prod(shape))) * std).reshape(shape)
