"""Every field of the state is under its root: flip any, and the root changes."""

import dataclasses

import numpy as np
import pytest

from model.spike import SpikeState
from model.state import State, root
from storage import checkpoint
from tests.storage.conftest import Small


@pytest.fixture
def state(made: Small) -> State:
    return checkpoint.load(made.store, made.run().ledger, 10)


def test_every_tensor_is_under_the_root(state: State) -> None:
    before, digests = root(state)
    for name, tensor in state.tensors().items():
        flat = tensor.reshape(-1).view(np.uint32)
        for place in (0, flat.size // 2, flat.size - 1):
            flat[place] ^= 1
            after, changed = root(state)
            assert after != before
            assert [other for other in digests if changed[other] != digests[other]] == [name]
            flat[place] ^= 1
    assert root(state)[0] == before


def test_every_scalar_is_under_the_root(state: State) -> None:
    changes = {
        "step": state.step + 1,
        "tokens": state.tokens + 1,
        "windows": state.windows + 1,
        "updates": state.updates + 1,
        "spike": SpikeState(cooldown=state.spike.cooldown + 1, events=state.spike.events),
    }
    fields = {field.name for field in dataclasses.fields(State)}
    assert fields == {"weights", "m", "v", *changes}  # a new field needs a line here
    roots = {root(dataclasses.replace(state, **{name: value}))[0] for name, value in changes.items()}
    roots |= {root(dataclasses.replace(state, spike=SpikeState(events=(9,))))[0], root(state)[0]}
    assert len(roots) == len(changes) + 2


def test_names_and_shapes_are_under_the_root(state: State) -> None:
    before = root(state)[0]
    head = state.weights["head"]
    state.weights["head"] = head.reshape(head.shape[::-1])
    assert root(state)[0] != before
    state.weights["hood"] = state.weights.pop("head").reshape(head.shape)
    assert root(state)[0] != before


def test_a_state_survives_its_own_form(state: State) -> None:
    assert root(State.of(state.tensors(), state.scalars())) == root(state)
