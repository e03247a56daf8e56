"""The state root covers every field: flip one, and the root changes."""

import copy
from collections.abc import Callable

import numpy as np
import pytest

import kernels
from model.spike import SpikeState
from model.state import State, initial_state, root
from tests.model import tiny

CHANGES: dict[str, Callable[[State], None]] = {
    "step": lambda s: setattr(s, "step", s.step + 1),
    "tokens": lambda s: setattr(s, "tokens", s.tokens + 1),
    "windows": lambda s: setattr(s, "windows", s.windows + 1),
    "updates": lambda s: setattr(s, "updates", s.updates + 1),
    "spike cooldown": lambda s: setattr(s, "spike", SpikeState(s.spike.cooldown + 1, s.spike.events)),
    "spike events": lambda s: setattr(s, "spike", SpikeState(s.spike.cooldown, (3,))),
}


@pytest.fixture(scope="module")
def state() -> State:
    return initial_state(tiny.spec(), kernels.backend("reference"))


@pytest.mark.parametrize("field", CHANGES)
def test_root_covers_scalar(state: State, field: str) -> None:
    changed = copy.deepcopy(state)
    CHANGES[field](changed)
    assert root(changed)[0] != root(state)[0]


def test_root_covers_every_bit_of_every_tensor(state: State) -> None:
    before, digests = root(state)
    for name, tensor in state.tensors().items():
        bits = tensor.reshape(-1).view(np.uint32)
        for index in (0, len(bits) - 1):
            bits[index] ^= 1
            after, changed = root(state)
            assert after != before
            assert [key for key in digests if changed[key] != digests[key]] == [name]
            bits[index] ^= 1
    assert root(state)[0] == before


def test_round_trip(state: State) -> None:
    assert root(State.of(state.tensors(), state.scalars())) == root(state)


def test_every_field_is_in_the_scalars_or_tensors(state: State) -> None:
    assert set(vars(state)) == {"weights", "m", "v"} | set(state.scalars())


def test_foreign_parts_are_refused(state: State) -> None:
    with pytest.raises(ValueError, match="scalars"):
        State.of(state.tensors(), {})
    for counters in ({"updates": -1}, {"step": 2, "updates": 3}, {"tokens": -5}):
        with pytest.raises(ValueError, match="counters"):
            State.of(state.tensors(), state.scalars() | counters)
    with pytest.raises(ValueError, match="group"):
        State.of({"gradients/q": np.zeros(1, np.float32)}, state.scalars())
