"""Figures for people, beside the ledger and in no digest: norms, quantiser steps, clipped and zero shares."""

from typing import Any

import numpy as np

from kernels import canonical
from model.state import State
from model.transformer import Network


def measure(net: Network, state: State, sums: dict[str, Any], mean: np.float32) -> dict[str, Any]:
    """Per parameter: norms as float bits (the weight's after the update), elements and zero gradients; of a quantised
    one also the steps and the codes at the rim with which the step was computed, before the update."""
    return {name: _tensor(net, name, weight, sums[name], mean) for name, weight in sorted(state.weights.items())}


def _tensor(net: Network, name: str, weight: np.ndarray, sums: Any, mean: np.float32) -> dict[str, Any]:
    backend, flag = net.backend, net.backend.new_flag()
    rows = weight.reshape(1 if weight.ndim == 1 else len(weight), -1)
    gradient = backend.to_host(sums)
    report: dict[str, Any] = {
        "weight_norm": _norm(backend, backend.fixed_sum(backend.to_device(rows * rows), flag), flag),
        "gradient_norm": _norm(backend, backend.square_rows(sums, mean), flag),
        "elements": int(gradient.size),
        "zero_gradients": int(np.count_nonzero(gradient == 0)),
    }
    quantised = net.weights.get(name)
    if quantised is not None:
        scale, codes = backend.to_host(quantised.scale), backend.to_host(quantised.hi)
        report["smallest_step"] = canonical.bits(scale.min())
        report["largest_step"] = canonical.bits(scale.max())
        report["codes_at_rim"] = int(np.count_nonzero(np.abs(codes) == 127))
    return report


def _norm(backend: Any, squares: Any, flag: Any) -> str:
    return canonical.bits(np.sqrt(backend.to_host(backend.fixed_sum(squares[None, :], flag))[0]))
