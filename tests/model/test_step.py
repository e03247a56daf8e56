"""The step function: one trajectory on every backend, void steps, skipped updates, and what a token may influence."""

import copy

import numpy as np
import pytest

import kernels
from kernels import canonical, digest
from model import schedule
from model.spec import NumericsSpec, RunSpec, SpikeSpec
from model.state import State, initial_state
from model.step import StepRecord, evaluate, step
from model.transformer import forward, network
from tests.model import tiny

BACKENDS = (*kernels.HOSTS, "generic:cpu")


def run_steps(run: RunSpec, name: str, count: int, state: State | None = None) -> tuple[State, list[StepRecord]]:
    backend = kernels.backend(name)
    state = state or initial_state(run, backend)
    records = []
    for _ in range(count):
        plan = schedule.plan(run, state.step)
        records.append(step(run, backend, state, tiny.windows(run, plan.first_window, plan.windows)))
    return state, records


def trajectory(records: list[StepRecord]) -> list[tuple[str, str | None, str | None]]:
    return [(r.state, r.gradient, r.loss) for r in records]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "numerics",
    [
        tiny.LEAST,
        NumericsSpec(),
        NumericsSpec(
            weight_scale="lsq", input_gradient_slices=2, weight_gradient_slices=2, down_slices=2, unit_windows=2
        ),
    ],
    ids=["least", "default", "two slices"],
)
def test_hundred_steps_agree_between_backends(numerics: NumericsSpec) -> None:
    run = tiny.spec(numerics=numerics)
    expected, *others = (trajectory(run_steps(run, name, 100)[1]) for name in ("reference", "cpu", "generic:cpu"))
    assert all(got == expected for got in others)


@pytest.mark.slow
def test_three_steps_at_full_length_agree_between_backends() -> None:
    run = tiny.spec(seq_len=4096, windows=1, steps=3, window=512, layers=2)
    expected, *others = (trajectory(run_steps(run, name, 3)[1]) for name in ("reference", "cpu", "generic:cpu"))
    assert all(got == expected for got in others)


@pytest.mark.parametrize("name", BACKENDS)
def test_later_tokens_change_nothing_earlier(name: str) -> None:
    run, backend = tiny.spec(), kernels.backend(name)
    state, flag = initial_state(run, backend), backend.new_flag()
    net = network(run, backend, state.weights, flag)
    tokens = tiny.windows(run, 0, 2)[:, :-1].reshape(-1)
    other = tokens.copy()
    position = 77
    other[position + 1 : 128] = (other[position + 1 : 128] + 1) % run.model.vocab
    before, after = (map(backend.to_host, forward(net, t, flag).rows) for t in (tokens, other))
    for a, b in zip(before, after, strict=True):
        assert a[: position + 1].tobytes() == b[: position + 1].tobytes()
        assert a[128:].tobytes() == b[128:].tobytes()  # the unit's other window
        assert a[position + 1 : 128].tobytes() != b[position + 1 : 128].tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_order_of_units_changes_no_bit(name: str) -> None:
    run, backend = tiny.spec(windows=6), kernels.backend(name)
    state = initial_state(run, backend)
    windows = tiny.windows(run, 0, 6)
    orders = (windows, windows[::-1], windows[[3, 1, 4, 0, 5, 2]])
    records = [step(run, backend, copy.deepcopy(state), order) for order in orders]
    assert len({(r.state, r.gradient, r.loss) for r in records}) == 1


# A quiet NaN, a negative signalling one with a payload, both infinities, and a value whose square is infinite.
NOT_FINITE = (0x7FC00000, 0xFF812345, 0x7F800000, 0xFF800000, 0x7F61B1E6)
BLOCK = tuple(f"blocks.001.{part}" for part in ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate_up", "down"))


def with_planted(run: RunSpec, name: str, where: str, row: int, bits: int) -> tuple[State, StepRecord]:
    """A first step whose state had one element of the weight `where`, in that row, replaced before."""
    backend = kernels.backend(name)
    state = initial_state(run, backend)
    state.weights[where][row : row + 1].reshape(-1).view(np.uint32)[0] = bits
    weights = {key: w.copy() for key, w in state.weights.items()}
    record = step(run, backend, state, tiny.windows(run, 0, 2))
    if record.event:
        assert all(state.weights[key].tobytes() == w.tobytes() for key, w in weights.items())
        assert not any(x.any() for moments in (state.m, state.v) for x in moments.values())
    return state, record


@pytest.mark.parametrize("where", ["embed", "embed_norm", *BLOCK, "final_norm", "head"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_value_that_is_not_finite_voids_the_step_alike_on_every_backend(where: str) -> None:
    run = tiny.spec(seq_len=32)
    row = tiny.windows(run, 0, 2)[0, 3] if where == "embed" else 0
    for bits in NOT_FINITE:
        (state, record), *others = (with_planted(run, name, where, row, bits) for name in BACKENDS)
        assert [other for _, other in others] == [record] * len(others), hex(bits)
        assert (record.loss, record.grad_norm, record.gradient, record.event) == (None, None, None, "nonfinite")
        assert (record.z_loss, record.gradients, record.zero_gradients, record.clipped) == (None, {}, (), False)
        assert state.updates == 0 and state.step == 1 and state.tokens == 64


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_embedding_that_no_token_asks_for_voids_no_step() -> None:
    run = tiny.spec(seq_len=32)
    row = min(set(range(run.model.vocab)) - set(tiny.windows(run, 0, 2).flat))
    for bits in NOT_FINITE:
        (_, record), *others = (with_planted(run, name, "embed", row, bits) for name in BACKENDS)
        assert [other for _, other in others] == [record] * len(others), hex(bits)
        assert record.event == "" and record.loss is not None


@pytest.mark.parametrize("name", BACKENDS)
def test_a_spike_skips_five_updates_and_replays(name: str) -> None:
    run = tiny.spec(spike=SpikeSpec(norm="0.000001", from_step=3), steps=12)
    state, records = run_steps(run, name, 4)
    assert [r.event for r in records] == ["", "", "", "spike"]
    kept = copy.deepcopy(state)
    state, records = run_steps(run, name, 4, state)
    assert [r.event for r in records] == ["cooldown"] * 4
    assert state.updates == 3 and state.step == 8
    assert state.weights["head"].tobytes() == kept.weights["head"].tobytes()
    assert trajectory(run_steps(run, name, 4, kept)[1]) == trajectory(records)


def test_five_fresh_events_halt() -> None:
    run = tiny.spec(spike=SpikeSpec(norm="0.000001", from_step=0), steps=30)
    _, records = run_steps(run, "cpu", 21)
    assert [r.step for r in records if r.event == "spike"] == [0, 5, 10, 15, 20]
    assert [r.halt for r in records] == [False] * 20 + [True]


def test_record_says_what_happened() -> None:
    run = tiny.spec()
    state, records = run_steps(run, "cpu", 2)
    first, second = records
    assert canonical.from_bits(first.lr) == 0 and canonical.from_bits(second.lr) > 0
    assert (second.first_window, second.windows, second.tokens) == (2, 2, 512)
    assert second.state == digest.root(second.tensors, state.scalars())
    assert second.gradient == digest.root(second.gradients, {})
    assert set(second.gradients) == set(state.weights)
    assert second.zero_gradients == ()


def test_wrong_windows_are_refused() -> None:
    run, backend = tiny.spec(), kernels.backend("cpu")
    state = initial_state(run, backend)
    with pytest.raises(ValueError, match=r"\[2, 129\].*\[3, 129\]"):
        step(run, backend, state, tiny.windows(run, 0, 3))
    with pytest.raises(ValueError, match="vocabulary is 0 to 96"):
        step(run, backend, state, tiny.windows(run, 0, 2) + 50)
    assert state.step == 0


def test_evaluation_leaves_the_state_alone() -> None:
    run, backend = tiny.spec(), kernels.backend("cpu")
    state = initial_state(run, backend)
    before = {key: w.tobytes() for key, w in state.tensors().items()}
    assert evaluate(run, backend, state, tiny.windows(run, 50, 3)) is not None
    assert before == {key: w.tobytes() for key, w in state.tensors().items()}
