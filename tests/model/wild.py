"""A tiny state whose values lie where rule 4's floors are: from 1 down to subnormals."""

from __future__ import annotations

import numpy as np

from model.spec import RunSpec
from model.state import State, initial_state
from tests.model import tiny


def state(run: RunSpec) -> State:
    """Every weight's rows, and a gain's elements, shrink by 2⁰ to 2⁻¹⁴⁷ in turn, every third one by nothing; moments
    surround their floors."""
    from kernels import reference

    made = initial_state(run, reference)
    for name, w in made.weights.items():
        exponent = -3 * (np.arange(len(w), dtype=np.int32) % 50)
        exponent[::3] = 0
        w[...] = np.ldexp(w, exponent.reshape(-1, *[1] * (w.ndim - 1)))
        turn = np.arange(w.size, dtype=np.int32).reshape(w.shape) % 12
        made.m[name][...] = np.ldexp(np.float32(1.5), -turn - 58)
        made.v[name][...] = np.ldexp(np.float32(1.5), -turn - 94)
    return made


def windows(run: RunSpec, step: int) -> np.ndarray:
    """The windows of one step."""
    return tiny.windows(run, 2 * step, 2)
