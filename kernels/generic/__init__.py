"""A backend for any torch device (Apple, Intel, AMD, NVIDIA without Triton, CPU), built only from torch
operations.

Written to be right on a device that nobody tested, rather than fast: it asks for float32 + − × and rint,
integer operations and comparisons. Square roots, divisions and conversions are corrected with integers
(exact.py); int8 products take whichever method a probe finds exact (products.py). Where the device is wrong all
the same, the conformance vectors name the operation. float64 is used nowhere. Tensors: f32, int8, int32, int64;
bf16 as int16 of the same bits.
"""

from collections.abc import Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import digest
from kernels.generic import attention, head, initial, layers, linear, numbers, optimizer, products, quantise

MODULES = {
    attention: ("attention", "attention_backward"),
    head: ("head", "head_backward"),
    layers: (
        *("embed", "embed_backward", "norm_backward", "norm_bf16", "norm_rows"),
        *("rotate_backward", "rotate_rows", "swiglu_backward", "swiglu_rows"),
    ),
    linear: ("linear_backward", "project", "project_add"),
    numbers: ("fixed_sum",),
    optimizer: ("adamw", "square_rows"),
    quantise: ("quantise_rows", "quantise_weight", "weight_of"),
}


@cache
def on(name: str) -> ModuleType:
    """The backend of a torch device, like "cpu", "mps", "xpu" or "cuda:1"; ValueError where this machine lacks it."""
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"torch {torch.__version__} has no device {name!r} on this machine: {reason}") from None
    module = ModuleType(f"kernels.generic.{name}", __doc__)
    own = {
        "NAME": f"generic:{name}",
        "describe": partial(_describe, name, device),
        "device_memory": _device_memory,
        "new_flag": partial(torch.zeros, 1, dtype=torch.int32, device=device),
        "new_sums": partial(torch.zeros, dtype=torch.int64, device=device),
        "leaves_of": _leaves_of,
        "to_device": partial(to_device, device),
        "to_host": to_host,
        "initial_weights": partial(initial.initial_weights, device),
    }
    vars(module).update(own)
    for part, names in MODULES.items():
        vars(module).update({function: getattr(part, function) for function in names})
    return module


def _describe(name: str, device: torch.device) -> dict[str, Any]:
    """What this backend runs on, for segment records and certificates."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "backend": f"generic:{name}",
        "product": products.method(device),
        "torch": torch.__version__,
        "device": kind,
    }


def _device_memory() -> None:
    """Nobody counted what these operations take of a device."""
    return None


def _leaves_of(tensors: Mapping[str, np.ndarray | Tensor]) -> dict[str, bytes]:
    """The leaf digests of each tensor, by name, made on the host."""
    return digest.leaves_of({name: to_host(x) for name, x in tensors.items()})


def to_device(device: torch.device, x: np.ndarray | Tensor) -> Tensor:
    """A host array on the device; a tensor stays what it is. On the CPU memory is shared where possible."""
    if isinstance(x, Tensor):
        return x
    array = np.require(x, requirements=["C", "W"])  # torch warns of arrays that it may not write, so those are copied
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array).to(device)


def to_host(x: np.ndarray | Tensor) -> np.ndarray:
    """A tensor as a host array, bf16 as uint16."""
    if isinstance(x, np.ndarray):
        return x
    array = x.cpu().numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array
