"""Figures for people, beside the ledger and in no digest: norms, quantiser steps, clipped and zero shares."""

from types import ModuleType
from typing import Any

import numpy as np

from kernels import canonical
from model.group import ALONE, Group
from model.state import State
from model.transformer import Network, quantised


def codes(net: Network) -> dict[str, dict[str, Any]]:
    """Per quantised parameter: the steps and the codes at the rim with which a step is computed, before its update."""
    return {name: _codes(net, name) for name in quantised(net)}


def measure(
    backend: ModuleType,
    state: State,
    sums: dict[str, Any],
    mean: np.float32,
    codes: dict[str, dict[str, Any]],
    group: Group = ALONE,
) -> dict[str, Any]:
    """Per parameter: norms as float bits (the weight's after the update), elements and zero gradients; and `codes`."""
    weights = group.squares({name: _row_squares(backend, w) for name, w in state.weights.items()})
    gradients = group.squares({name: backend.square_rows(s, mean) for name, s in sums.items()})
    zero = group.counts({name: int(np.count_nonzero(backend.to_host(s) == 0)) for name, s in sums.items()})
    elements = group.counts({name: int(np.prod(s.shape)) for name, s in sums.items()})
    return {
        name: {
            "weight_norm": _norm(backend, weights[name]),
            "gradient_norm": _norm(backend, gradients[name]),
            "elements": elements[name],
            "zero_gradients": zero[name],
        }
        | codes.get(name, {})
        for name in sorted(elements)
    }


def _row_squares(backend: ModuleType, weight: Any) -> Any:
    """Sum of squares of each row, f32[R]; of a vector, f32[1]."""
    rows = weight.reshape(1 if weight.ndim == 1 else len(weight), -1)
    return backend.fixed_sum(backend.to_device(rows * rows), backend.new_flag())


def _codes(net: Network, name: str) -> dict[str, Any]:
    weight = net.weight(name, net.backend.new_flag())
    scale, hi = net.backend.to_host(weight.scale), net.backend.to_host(weight.hi)
    return {
        "smallest_step": canonical.bits(scale.min()),
        "largest_step": canonical.bits(scale.max()),
        "codes_at_rim": int(np.count_nonzero(np.abs(hi) == 127)),
    }


def _norm(backend: ModuleType, squares: Any) -> str:
    rows = backend.to_device(squares)[None, :]
    return canonical.bits(np.sqrt(backend.to_host(backend.fixed_sum(rows, backend.new_flag()))[0]))
