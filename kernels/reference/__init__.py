"""The definition of every operation, in plain NumPy: the specification, the oracle of the tests, a second
implementation.

Written to be read; no code is shared with the fast backends. Files: numbers (rounding, maxima, sums), elementary (exp2,
log2, sigmoid), quantise, products, layers, attention, head, optimizer, philox and initial (randomness).
"""

from typing import Any

import numpy as np

from kernels.digest import leaves_of
from kernels.interface import Weight
from kernels.reference.attention import attention, attention_backward
from kernels.reference.head import head, head_backward
from kernels.reference.initial import initial_weights
from kernels.reference.layers import (
    embed,
    embed_backward,
    norm_backward,
    norm_bf16,
    norm_rows,
    rotate_backward,
    rotate_rows,
    swiglu_backward,
    swiglu_rows,
)
from kernels.reference.numbers import fixed_sum
from kernels.reference.optimizer import adamw, square_rows
from kernels.reference.products import linear_backward, project, project_add
from kernels.reference.quantise import quantise_rows, quantise_weight

NAME = "reference"

__all__ = [
    "NAME",
    "adamw",
    "attention",
    "attention_backward",
    "describe",
    "device_memory",
    "embed",
    "embed_backward",
    "fixed_sum",
    "head",
    "head_backward",
    "initial_weights",
    "leaves_of",
    "linear_backward",
    "new_flag",
    "new_sums",
    "norm_backward",
    "norm_bf16",
    "norm_rows",
    "project",
    "project_add",
    "quantise_rows",
    "quantise_weight",
    "rotate_backward",
    "rotate_rows",
    "square_rows",
    "swiglu_backward",
    "swiglu_rows",
    "to_device",
    "to_host",
    "weight_of",
]


def new_flag() -> np.ndarray:
    """A step's flag, not raised."""
    return np.zeros(1, np.int32)


def new_sums(shape: tuple[int, ...]) -> np.ndarray:
    """Fixed-point sums, all zero."""
    return np.zeros(shape, np.int64)


def to_device(array: np.ndarray) -> np.ndarray:
    """The device is the host: the array itself."""
    return array


def to_host(array: np.ndarray) -> np.ndarray:
    """The array itself."""
    return array


def weight_of(hi: np.ndarray, scale: np.ndarray) -> Weight:
    """A weight from its codes and scales."""
    return Weight(hi, scale)


def device_memory() -> None:
    """There is none but the host's."""
    return None


def describe() -> dict[str, Any]:
    """What this backend runs on, for segment records and certificates."""
    return {"backend": NAME, "product": "float64", "numpy": np.__version__}
