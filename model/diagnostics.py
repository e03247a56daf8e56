"""Figures for people, beside the ledger and in no digest: norms, quantiser steps, clipped and zero shares."""

from typing import Any

import numpy as np

from kernels import canonical
from model.state import State
from model.transformer import Network


def measure(net: Network, state: State, sums: dict[str, np.ndarray], mean: np.float32) -> dict[str, Any]:
    """Per parameter, after the update: norms as float bits, smallest and largest quantiser step, codes at the rim, zero
    gradients."""
    return {name: _tensor(net, name, weight, sums[name], mean) for name, weight in sorted(state.weights.items())}


def _tensor(net: Network, name: str, weight: np.ndarray, sums: np.ndarray, mean: np.float32) -> dict[str, Any]:
    backend, flag = net.backend, net.backend.new_flag()
    rows = weight.reshape(1 if weight.ndim == 1 else len(weight), -1)
    report: dict[str, Any] = {
        "weight_norm": _norm(backend, backend.fixed_sum(rows * rows, flag), flag),
        "gradient_norm": _norm(backend, backend.square_rows(sums, mean), flag),
        "elements": int(sums.size),
        "zero_gradients": int(np.count_nonzero(sums == 0)),
    }
    quantised = net.weights.get(name)
    if quantised is not None:
        report["smallest_step"] = canonical.bits(quantised.scale.min())
        report["largest_step"] = canonical.bits(quantised.scale.max())
        report["codes_at_rim"] = int(np.count_nonzero(np.abs(quantised.hi) == 127))
    return report


def _norm(backend: Any, squares: np.ndarray, flag: Any) -> str:
    return canonical.bits(np.sqrt(backend.fixed_sum(squares[None, :], flag)[0]))
