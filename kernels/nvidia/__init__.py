"""The NVIDIA backend: every operation of a step as Triton kernels, exact by the contract.

Arrays are torch tensors on the current CUDA device; bf16 is int16 of the same bits. Same functions and same bytes as
kernels/reference, which defines them. Nothing waits for the device except `to_host` and `leaves_of`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from kernels import generic
from kernels.generic import initial, to_host
from kernels.nvidia import digest
from kernels.nvidia.attention import attention
from kernels.nvidia.attention_backward import attention_backward
from kernels.nvidia.head import head, head_backward
from kernels.nvidia.layers import embed, embed_backward, norm_backward, norm_bf16, norm_rows
from kernels.nvidia.linear import linear_backward, project, project_add
from kernels.nvidia.numbers import DEVICE, zeros
from kernels.nvidia.optimizer import adamw, fixed_sum, square_rows
from kernels.nvidia.quantise import quantise_rows, quantise_weight, weight_of
from kernels.nvidia.rotate import rotate_backward, rotate_rows
from kernels.nvidia.swiglu import swiglu_backward, swiglu_rows

if DEVICE.type == "cuda" and not torch.cuda.is_available():
    raise ImportError(f"PyTorch {torch.__version__} finds no CUDA device")

NAME = "nvidia"
__all__ = [
    "NAME",
    "adamw",
    "attention",
    "attention_backward",
    "compiled",
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


def new_flag() -> Tensor:
    """A step's flag, not raised."""
    return zeros((1,), torch.int32)


def new_sums(shape: tuple[int, ...]) -> Tensor:
    """Fixed-point sums, all zero."""
    return zeros(shape, torch.int64)


def to_device(x: np.ndarray | Tensor) -> Tensor:
    """A host array on the device, bf16 as int16; a tensor stays what it is."""
    return generic.to_device(DEVICE, x)


def leaves_of(tensors: Mapping[str, np.ndarray | Tensor]) -> dict[str, bytes]:
    """The leaf digests of each tensor f32 or i64, by name; the device hashes all of them before the host waits."""
    return digest.leaves_of({name: to_device(x) for name, x in tensors.items()})


def initial_weights(seed: int, name: str, shape: tuple[int, ...], std: np.float32) -> Tensor:
    """f32[shape] of (seed, parameter name): torch's integers and float32 + − × alone."""
    return initial.initial_weights(DEVICE, seed, name, shape, std)


def device_memory() -> int | None:
    """Bytes that are free on the device, or that PyTorch's allocator of this process holds and has given to nobody."""
    if DEVICE.type != "cuda":
        return None
    held: int = torch.cuda.memory_reserved(DEVICE) - torch.cuda.memory_allocated(DEVICE)
    return torch.cuda.mem_get_info(DEVICE)[0] + held


def compiled() -> Path | None:
    """A file in Triton's cache that kernels.warm makes once this version's kernels lie there, compiled for this device
    by this Triton; None where nothing is compiled."""
    if DEVICE.type != "cuda":
        return None
    folder = Path(__file__).parent
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    kind = (*torch.cuda.get_device_capability(DEVICE), triton.__version__, torch.__version__)
    named = hashlib.sha256(sources + repr(kind).encode()).hexdigest()[:32]
    return Path(triton.knobs.cache.dir) / f"verbatim-{named}"


def describe() -> dict[str, Any]:
    """What this backend runs on, for segment records and certificates: none of it changes a bit."""
    kind = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "interpreter"
    return {"backend": NAME, "device": kind, "torch": torch.__version__, "triton": triton.__version__}
