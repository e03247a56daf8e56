"""The step function. Training, restart validation, audit and every rank of a cluster call this one.

windows ─▶ unit gradients, summed as integers ─▶ norm ─▶ spike protocol ─▶ AdamW (or not) ─▶ next state, record

A run whose spec says so adds them as floats in a recorded order instead: `model.ordered`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from kernels import canonical, digest
from kernels.interface import LSE2_BITS, AdamScalars
from model import diagnostics, host, schedule, spike
from model.group import ALONE, Group, Kind
from model.memory import KEEP_ALL, MemoryPlan
from model.spec import OptimizerSpec, Ordered, RunSpec
from model.state import State
from model.transformer import Network, network, unit_gradients, unit_loss


@dataclass(frozen=True)
class StepRecord:
    """What one step did. Floats are the eight hex digits of their bits; None where the step was not finite."""

    step: int
    tokens: int  # seen after this step
    first_window: int
    windows: int
    lr: str
    loss: str | None  # mean negative log-likelihood, nats
    z_loss: str | None  # mean squared log-normaliser
    grad_norm: str | None  # before clipping
    gradient: str | None  # root of the summed int64 gradient, or of the f32 mean of an ordered reduction
    state: str  # root of the state after the step
    event: str  # "", "spike", "nonfinite" or "cooldown"; the update was skipped unless ""
    clipped: bool
    halt: bool
    tensors: dict[str, str]  # digest of each tensor of the state
    gradients: dict[str, str]  # digest of each summed gradient; empty where gradient is None
    zero_gradients: tuple[str, ...]  # parameters whose summed gradient is exactly zero
    diagnostics: dict[str, Any] | None


def step(
    spec: RunSpec,
    backend: ModuleType,
    state: State,
    windows: np.ndarray,
    diagnose: bool = False,
    take: Callable[[dict[str, np.ndarray]], None] | None = None,
    memory: MemoryPlan = KEEP_ALL,
    group: Group = ALONE,
) -> StepRecord:
    """Do step `state.step` on its windows (integers [n, seq_len + 1]); `state`, whose tensors may lie on the host or on
    the backend's device, becomes the state after it.

    In a group every rank is given the rows of the state that it owns and all windows, of which those of other ranks'
    units may be zeros; all return the same record. No memory plan and no group changes a bit. `take` is lent the summed
    int64 gradients of a finite step (an ordered reduction's f32), by parameter: an audit's proof of replay needs their
    bytes. Raises ValueError where the windows are not those that the plan of this step asks for in number, length or
    vocabulary, or the group is not one that an ordered reduction can be done by.
    """
    plan = schedule.plan(spec, state.step)
    windows = _checked(spec, plan.windows, windows)
    sums, nll, lse2, finite, codes = gradients(spec, backend, state.weights, windows, memory, diagnose, group)
    lr = schedule.learning_rate(spec, plan.tokens_before)
    tokens = len(windows) * spec.model.seq_len
    loss, z_loss = mean_losses(tokens, nll, lse2) if finite else (None, None)
    scale = gradient_scale(spec, tokens)
    norm = gradient_norm(backend, sums, scale, group) if finite else None
    state.spike, event, halt = spike.decide(spec.spike, state.spike, state.step, norm)
    clip = clip_factor(spec, norm) if norm is not None else np.float32(1)
    if not event:
        state.updates += 1
        _update(spec, backend, state, sums, lr, scale, clip)
    report = diagnostics.measure(backend, state, sums, scale, codes, group) if diagnose and finite else None
    gradient = dict(sorted(sums.items())) if finite else {}
    state.step, state.tokens, state.windows = state.step + 1, plan.tokens_after, plan.first_window + plan.windows
    kind: Kind = "mean" if isinstance(spec.numerics.reduction, Ordered) else "gradient"
    digests, zero = group.digests(gradient, backend.leaves_of, kind) if finite else ({}, ())
    if take is not None and finite:
        take({name: backend.to_host(s) for name, s in group.whole(gradient, kind).items()})
    tensors, _ = group.digests(state.tensors(), backend.leaves_of, "state")
    return StepRecord(
        step=plan.step,
        tokens=plan.tokens_after,
        first_window=plan.first_window,
        windows=plan.windows,
        lr=canonical.bits(lr),
        loss=loss,
        z_loss=z_loss,
        grad_norm=canonical.bits(norm) if norm is not None else None,
        gradient=digest.root(digests, {}) if finite else None,
        state=digest.root(tensors, state.scalars()),
        event=event,
        clipped=bool(norm is not None and not event and clip < np.float32(1)),
        halt=halt,
        tensors=tensors,
        gradients=digests,
        zero_gradients=zero,
        diagnostics=report,
    )


class Summed(NamedTuple):
    """The gradients of some units, summed as integers, and what came with them."""

    sums: dict[str, Any]  # i64 by parameter name, units of 2⁻²⁴: the rows that this rank owns; f32 if ordered: the mean
    nll: int  # units of 2⁻²⁴ nats
    lse2: int  # units of 2⁻²⁰
    finite: bool  # else the sums mean nothing
    codes: dict[str, dict[str, Any]]  # diagnostics.codes(), where asked for


def gradients(
    spec: RunSpec,
    backend: ModuleType,
    weights: dict[str, Any],
    windows: np.ndarray,
    memory: MemoryPlan = KEEP_ALL,
    diagnose: bool = False,
    group: Group = ALONE,
) -> Summed:
    """The group's summed gradients of whole units of windows i64[n, seq_len + 1], without an update."""
    flag = backend.new_flag()
    net = network(spec, backend, weights, flag, memory, group)
    sums, nll, lse2 = _accumulate(net, windows, flag, group)
    nll, lse2, raised = group.total(int(nll), int(lse2), int(flag[0]))
    finite = not raised  # the sum of flags of 0 and 1 says what their maximum does
    return Summed(sums, nll, lse2, finite, diagnostics.codes(net) if diagnose and finite else {})


def each_unit(
    spec: RunSpec, backend: ModuleType, weights: dict[str, Any], windows: np.ndarray, memory: MemoryPlan = KEEP_ALL
) -> Iterator[Summed]:
    """The gradients of each unit of windows [n, seq_len + 1] alone, in order; the sums are new arrays each time."""
    windows, flag = _checked(spec, len(windows), windows), backend.new_flag()
    net = network(spec, backend, weights, flag, memory)
    size = spec.numerics.unit_windows
    for first in range(0, len(windows), size):
        unit = _Units(net, windows[first : first + size], flag)
        sums = {name: backend.new_sums(shape) for name, shape in unit.shapes.items()}
        unit.add(0, sums)
        yield Summed(sums, int(unit.nll), int(unit.lse2), not int(flag[0]), {})
        del sums


def evaluate(
    spec: RunSpec,
    backend: ModuleType,
    state: State,
    windows: np.ndarray,
    memory: MemoryPlan = KEEP_ALL,
    group: Group = ALONE,
    take: Callable[[np.ndarray], None] | None = None,
) -> str | None:
    """Mean negative log-likelihood in nats, as bits, of windows under the state's weights; None where not finite.

    `take` is given each window's own sum, int64[n] in units of 2⁻²⁴ nats, of this rank's windows: no record holds them,
    so that they prove to an auditor who did the work.
    """
    windows = _checked(spec, len(windows), windows)
    flag = backend.new_flag()
    net = network(spec, backend, state.weights, flag, memory, group)
    own = [
        unit_loss(net, windows[window][None, :], flag)[0] for batch in group.batches(len(windows)) for window in batch
    ]
    sums = np.array([int(nll) for nll in own], np.int64)
    if take is not None:
        take(sums)
    nll, raised = group.total(int(sums.sum(dtype=np.int64)), int(flag[0]))
    return None if raised else canonical.bits(host.f32(nll) * host.mean_scale(len(windows) * spec.model.seq_len))


def mean_losses(tokens: int, nll: int, lse2: int) -> tuple[str, str]:
    """(loss, z-loss) of a step as bits, from the sums over its tokens: nll in units of 2⁻²⁴ nats, lse2 of 2⁻²⁰."""
    scales = host.mean_scale(tokens), host.mean_scale(tokens, LSE2_BITS)
    return canonical.bits(host.f32(nll) * scales[0]), canonical.bits(host.f32(lse2) * scales[1])


def gradient_scale(spec: RunSpec, tokens: int) -> np.float32:
    """What turns the sums of a step of so many tokens into its mean gradient; an ordered reduction's are a unit's."""
    unit = spec.numerics.unit_windows * spec.model.seq_len
    return host.mean_scale(unit if isinstance(spec.numerics.reduction, Ordered) else tokens)


def gradient_norm(backend: ModuleType, sums: dict[str, Any], mean: np.float32, group: Group = ALONE) -> np.float32:
    """Global norm of the mean gradient in two levels: squares by row, then over all rows, each an integer sum."""
    own = {name: backend.square_rows(s, mean) for name, s in sums.items()}  # all before the first is waited for
    squares = group.squares(own)
    rows = np.concatenate([backend.to_host(squares[name]) for name in sorted(squares)])
    total = backend.fixed_sum(backend.to_device(rows[None, :]), backend.new_flag())
    return np.sqrt(backend.to_host(total)[0])


def clip_factor(spec: RunSpec, norm: np.float32) -> np.float32:
    """min(1, limit ÷ (norm + 1e-6))."""
    return min(np.float32(1), host.f32(spec.optimizer.clip_norm) / (norm + host.f32("0.000001")))


class _Units:
    """The units of some windows, and the sums of the losses of those that were done."""

    def __init__(self, net: Network, windows: np.ndarray, flag: Any) -> None:
        self.net, self.windows, self.flag = net, windows, flag
        self.size, self.shapes = net.spec.numerics.unit_windows, net.spec.model.shapes()
        self.count = -(-len(windows) // self.size)
        self.two_z = host.f32(2 * host.exact(net.spec.optimizer.z_loss))
        self.nll: Any = 0
        self.lse2: Any = 0

    def add(self, unit: int, sums: dict[str, Any]) -> None:
        """Add the unit's gradient to sums i64."""
        windows = self.windows[unit * self.size : (unit + 1) * self.size]
        nll, lse2 = unit_gradients(self.net, windows, self.two_z, sums, self.flag)
        self.nll, self.lse2 = self.nll + nll, self.lse2 + lse2

    def gradient(self, unit: int) -> dict[str, np.ndarray]:
        """The unit's own, on the host."""
        backend = self.net.backend
        sums = {name: backend.new_sums(shape) for name, shape in self.shapes.items()}
        self.add(unit, sums)
        return {name: backend.to_host(s) for name, s in sums.items()}


def _accumulate(net: Network, windows: np.ndarray, flag: Any, group: Group) -> tuple[dict[str, Any], Any, Any]:
    """(the group's sums of gradients, this rank's sums of losses)."""
    units, reduction = _Units(net, windows, flag), net.spec.numerics.reduction
    if isinstance(reduction, Ordered):
        reduction.check_processes(group.size)
        mean = group.ordered(reduction.order(units.count), units.shapes, units.gradient)
        return {name: net.backend.to_device(x) for name, x in mean.items()}, units.nll, units.lse2
    joined: dict[str, Any] = {}
    for batch in group.batches(units.count):
        sums = group.new_sums(net.backend, units.shapes)
        for unit in batch:
            units.add(unit, sums)
            group.passed(unit, units.nll, units.lse2, flag)
        joined = group.joined(sums, joined)
    return joined, units.nll, units.lse2


def _update(
    spec: RunSpec,
    backend: ModuleType,
    state: State,
    sums: dict[str, Any],
    lr: np.float32,
    mean: np.float32,
    clip: np.float32,
) -> None:
    for name, weight in state.weights.items():
        update(spec, backend, name, (weight, state.m[name], state.v[name]), sums[name], state.updates, lr, mean, clip)


def update(
    spec: RunSpec,
    backend: ModuleType,
    name: str,
    arrays: tuple[Any, Any, Any],
    sums: Any,
    number: int,
    lr: np.float32,
    mean: np.float32,
    clip: np.float32,
) -> None:
    """Update `number`, from 1, of one parameter: its arrays (weight, m, v), in place, from its summed gradient."""
    scalars = _scalars(spec.optimizer, lr, number, not spec.optimizer.no_decay(name, arrays[0].shape), mean, clip)
    tensors = tuple(map(backend.to_device, arrays))
    backend.adamw(*tensors, sums, scalars)
    for array, tensor in zip(arrays, tensors, strict=True):
        if tensor is not array:
            array[...] = backend.to_host(tensor)


@lru_cache(maxsize=2)  # the same for all parameters that decay, and for all others
def _scalars(
    optimizer: OptimizerSpec, lr: np.float32, number: int, decays: bool, mean: np.float32, clip: np.float32
) -> AdamScalars:
    return host.adam_scalars(optimizer, lr, number, decays, mean, clip)


def _checked(spec: RunSpec, count: int, windows: np.ndarray) -> np.ndarray:
    shape = (count, spec.model.seq_len + 1)
    if windows.shape != shape:
        raise ValueError(f"the step needs windows of shape {list(shape)}, got {list(windows.shape)}")
    lowest, highest = int(windows.min()), int(windows.max())
    if lowest < 0 or highest >= spec.model.vocab:
        found = lowest if lowest < 0 else highest
        raise ValueError(f"a token is {found}; the vocabulary is 0 to {spec.model.vocab - 1}")
    return windows.astype(np.int64)
