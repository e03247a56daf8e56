"""The CPU backend: element-wise kernels compiled by Numba, exact int8 products through oneDNN or BLAS.

Arrays are NumPy's; bf16 is uint16. Same functions and same bytes as kernels/reference, which defines them.
"""

from __future__ import annotations

import numba
import torch

from kernels.cpu import products
from kernels.cpu.head import head, head_backward
from kernels.cpu.layers import (
    embed,
    embed_backward,
    norm_backward,
    norm_rows,
    rotate_backward,
    rotate_rows,
    swiglu_backward,
    swiglu_rows,
)
from kernels.cpu.linear import linear_backward, project, project_add
from kernels.cpu.optimizer import adamw, square_rows
from kernels.cpu.quantise import fixed_sum, quantise_rows, quantise_weight

NAME = "cpu"
__all__ = [
    "NAME",
    "adamw",
    "describe",
    "embed",
    "embed_backward",
    "fixed_sum",
    "head",
    "head_backward",
    "linear_backward",
    "norm_backward",
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
]


def describe() -> dict[str, str | int]:
    """What runs here, for a segment's record: none of it changes a bit."""
    return {
        "products": products.method(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "numba_threads": numba.get_num_threads(),
        "torch_threads": torch.get_num_threads(),
    }
