"""The state of a run between two steps: all that is needed to go on, and nothing else.

State k is the state before step k. Its root covers every tensor (weights, first and second moments) and every scalar.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from kernels import digest
from model import host
from model.spec import RunSpec
from model.spike import SpikeState

SCALARS = {"step", "tokens", "windows", "updates", "spike"}


@dataclass
class State:
    """Tensors by parameter name, f32, on the host or a backend's device, and counters. `step` advances it in place."""

    weights: dict[str, Any]
    m: dict[str, Any]
    v: dict[str, Any]
    step: int = 0  # steps done
    tokens: int = 0  # tokens seen
    windows: int = 0  # stream position
    updates: int = 0  # optimizer updates made: steps less the skipped ones
    spike: SpikeState = SpikeState()

    def tensors(self) -> dict[str, Any]:
        """Every tensor, as "weights/…", "m/…" and "v/…", in name order."""
        groups = {"m": self.m, "v": self.v, "weights": self.weights}
        return {f"{group}/{name}": groups[group][name] for group in groups for name in sorted(groups[group])}

    def placed(self, place: Callable[[Any], Any]) -> "State":
        """The same state with every tensor where `place` puts it: a backend's to_device, or its to_host."""
        weights, m, v = ({name: place(x) for name, x in group.items()} for group in (self.weights, self.m, self.v))
        return replace(self, weights=weights, m=m, v=v)

    def scalars(self) -> dict[str, Any]:
        """Everything else, for canonical JSON."""
        counters = {"step": self.step, "tokens": self.tokens, "windows": self.windows, "updates": self.updates}
        return {**counters, "spike": self.spike.scalars()}

    @classmethod
    def of(cls, tensors: Mapping[str, np.ndarray], scalars: Mapping[str, Any]) -> "State":
        """Inverse of tensors() and scalars(); raises ValueError for another set of scalars or groups."""
        if set(scalars) != SCALARS:
            raise ValueError(f"state has scalars {sorted(scalars)}; expected {sorted(SCALARS)}")
        groups: dict[str, dict[str, np.ndarray]] = {"weights": {}, "m": {}, "v": {}}
        for name, tensor in tensors.items():
            group, _, parameter = name.partition("/")
            if group not in groups:
                raise ValueError(f"state has a tensor {name!r}; its group must be one of {sorted(groups)}")
            groups[group][parameter] = tensor
        counters = {name: int(scalars[name]) for name in SCALARS - {"spike"}}
        if min(counters.values()) < 0 or counters["updates"] > counters["step"]:
            raise ValueError(f"state has counters {counters}; expected none below 0, and no more updates than steps")
        return cls(**groups, **counters, spike=SpikeState.of(scalars["spike"]))  # type: ignore[arg-type]


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Float32 zeros, of which the system makes real only what is written."""
    return np.zeros(shape, np.float32)


def initial_state(
    spec: RunSpec, backend: ModuleType, moments: Callable[[tuple[int, ...]], np.ndarray] = zeros
) -> State:
    """State 0: norm gains 1, everything else drawn from the seed, moments zero; `moments` gives them their place."""
    std = host.f32(spec.model.init_std)
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else backend.to_host(backend.initial_weights(spec.seed, name, shape, std))
        for name, shape in spec.model.shapes().items()
    }
    m, v = ({name: moments(shape) for name, shape in spec.model.shapes().items()} for _ in range(2))
    return State(weights, m, v)


def root(state: State) -> tuple[str, dict[str, str]]:
    """(state root, digest of each tensor) of a state on the host."""
    tensors = state.tensors()
    digests = digest.tensor_digests(tensors, digest.leaves_of(tensors))
    return digest.root(digests, state.scalars()), digests
