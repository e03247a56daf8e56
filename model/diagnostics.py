"""Figures for people, beside the ledger and in no digest: norms, quantiser steps, clipped and zero shares."""

from types import ModuleType
from typing import Any

import numpy as np

from kernels import canonical
from model.state import State
from model.transformer import Network, quantised


def codes(net: Network) -> dict[str, dict[str, Any]]:
    """Per quantised parameter: the steps and the codes at the rim with which a step is computed, before its update."""
    return {name: _codes(net, name) for name in quantised(net)}


def measure(
    backend: ModuleType, state: State, sums: dict[str, Any], mean: np.float32, codes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Per parameter: norms as float bits (the weight's after the update), elements and zero gradients; and `codes`."""
    return {
        name: _tensor(backend, weight, sums[name], mean) | codes.get(name, {})
        for name, weight in sorted(state.weights.items())
    }


def _tensor(backend: ModuleType, weight: np.ndarray, sums: Any, mean: np.float32) -> dict[str, Any]:
    flag = backend.new_flag()
    rows = weight.reshape(1 if weight.ndim == 1 else len(weight), -1)
    gradient = backend.to_host(sums)
    return {
        "weight_norm": _norm(backend, backend.fixed_sum(backend.to_device(rows * rows), flag), flag),
        "gradient_norm": _norm(backend, backend.square_rows(sums, mean), flag),
        "elements": int(gradient.size),
        "zero_gradients": int(np.count_nonzero(gradient == 0)),
    }


def _codes(net: Network, name: str) -> dict[str, Any]:
    weight = net.weight(name, net.backend.new_flag())
    scale, hi = net.backend.to_host(weight.scale), net.backend.to_host(weight.hi)
    return {
        "smallest_step": canonical.bits(scale.min()),
        "largest_step": canonical.bits(scale.max()),
        "codes_at_rim": int(np.count_nonzero(np.abs(hi) == 127)),
    }


def _norm(backend: ModuleType, squares: Any, flag: Any) -> str:
    return canonical.bits(np.sqrt(backend.to_host(backend.fixed_sum(squares[None, :], flag))[0]))
