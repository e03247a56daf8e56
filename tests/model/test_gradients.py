"""Right, not just repeatable: gradients against float64 autograd, and a batch that can be learned by heart."""

import numpy as np
import pytest

import kernels
from kernels import canonical
from model import host, schedule
from model.spec import NumericsSpec, RunSpec
from model.state import State, initial_state
from model.step import evaluate, step
from model.transformer import network, unit_gradients
from tests.model import tiny, truth

BACKENDS = pytest.mark.parametrize("name", kernels.HOSTS)


def gradients(run: RunSpec, name: str, state: State, windows: np.ndarray) -> dict[str, np.ndarray]:
    backend = kernels.backend(name)
    flag = backend.new_flag()
    net = network(run, backend, state.weights, flag)
    sums = {key: np.zeros(w.shape, np.int64) for key, w in state.weights.items()}
    for window in windows:
        unit_gradients(net, window[None, :], host.f32("0.0002"), sums, flag)
    assert not flag[0]
    mean = float(host.mean_scale(windows.size - len(windows)))
    return {key: value.astype(np.float64) * mean for key, value in sums.items()}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def trained(run: RunSpec, name: str, steps: int) -> State:
    """A state after some steps, since at the start many gradients are nearly noise."""
    backend = kernels.backend(name)
    state = initial_state(run, backend)
    for _ in range(steps):
        plan = schedule.plan(run, state.step)
        step(run, backend, state, tiny.windows(run, plan.first_window, plan.windows))
    return state


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("rule", ["max", "lsq"])
def test_whole_gradient_points_where_float64_says(name: str, slices: int, rule: str) -> None:
    run = tiny.spec(
        numerics=NumericsSpec(
            input_gradient_slices=slices, weight_gradient_slices=slices, weight_scale=rule, down_slices=slices
        )
    )  # type: ignore[arg-type]
    state = trained(run, name, 20)
    windows = tiny.windows(run, 1000, 4)
    _, expected = truth.loss_and_gradients(run, state.weights, windows)
    got = gradients(run, name, state, windows)
    measured = {key: cosine(got[key], expected[key]) for key in expected}
    print({k: round(v, 5) for k, v in measured.items()})
    assert min(measured.values()) >= 0.99, measured
    for key in expected:
        ratio = float(np.sqrt((got[key] ** 2).sum() / (expected[key] ** 2).sum()))
        assert abs(ratio - 1) < 0.05, (key, ratio)


@BACKENDS
def test_loss_agrees_with_float64(name: str) -> None:
    run = tiny.spec()
    state = trained(run, name, 20)
    windows = tiny.windows(run, 1000, 4)
    expected, _ = truth.loss_and_gradients(run, state.weights, windows)
    bits = evaluate(run, kernels.backend(name), state, windows)
    assert bits is not None
    assert abs(float(canonical.from_bits(bits)) - expected) < 0.01


@pytest.mark.slow
@BACKENDS
def test_one_batch_is_learned_by_heart(name: str) -> None:
    run = tiny.spec(peak_lr="0.004")
    backend = kernels.backend(name)
    state, windows, loss = initial_state(run, backend), tiny.windows(run, 0, 2), "00000000"
    for _ in range(100):
        loss = step(run, backend, state, windows).loss or "7f800000"
    assert canonical.from_bits(loss) < 0.5
