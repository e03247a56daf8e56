"""The CPU backend: element-wise kernels compiled by Numba, exact int8 products through oneDNN or BLAS.

Arrays are NumPy's; bf16 is uint16. Same functions and same bytes as kernels/reference, which defines them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from kernels.cpu import products
from kernels.cpu.attention import attention
from kernels.cpu.attention_backward import attention_backward
from kernels.cpu.head import head, head_backward
from kernels.cpu.initial import initial_weights
from kernels.cpu.layers import (
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
from kernels.cpu.linear import linear_backward, project, project_add
from kernels.cpu.optimizer import adamw, square_rows
from kernels.cpu.quantise import fixed_sum, quantise_rows, quantise_weight
from kernels.digest import leaves_of
from kernels.interface import Weight

NAME = "cpu"
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
    """What this backend runs on, for segment records and certificates: none of it changes a bit."""
    return {
        "backend": NAME,
        "product": products.method(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "numba_threads": numba.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "torch": torch.__version__,
    }
