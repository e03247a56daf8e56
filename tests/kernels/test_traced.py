"""The trace of a step: one list on every backend and by every memory plan, and the first operation that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kernels
from kernels.traced import KINDS, Operation, Traced, Unsteady, first_difference
from model.memory import KEEP_ALL, MemoryPlan
from model.spec import NumericsSpec, Ordered
from model.state import initial_state
from model.step import step
from tests.model import tiny

RUN = tiny.spec()
REFERENCE = kernels.backend("reference")
BACKENDS = (*kernels.HOSTS, "generic:cpu")
PLANS = (KEEP_ALL, MemoryPlan(recompute=1, hold_codes=False), MemoryPlan(recompute=2))


class Wrong(ModuleType):
    """A backend whose `name` goes wrong at its call number `call`, if at all."""

    def __init__(self, backend: ModuleType, name: str, call: int) -> None:
        super().__init__("wrong")
        self.backend, self.NAME, self.name, self.calls = backend, "wrong", name, self._calls(call)

    def _calls(self, call: int) -> Iterator[bool]:
        number = -1
        while True:
            number += 1
            yield number == call

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.backend, name)
        return self._flawed if name == self.name else function

    def _flawed(self, *args: Any) -> Any:
        result = getattr(self.backend, self.name)(*args)
        if next(self.calls):
            changed = args[0] if self.name == "adamw" else args[4] if self.name == "head_backward" else result
            changed.reshape(-1)[0] += 1
        return result


def traced(backend: ModuleType, plan: MemoryPlan = KEEP_ALL, **options: Any) -> tuple[str, Traced]:
    state = initial_state(RUN, REFERENCE).placed(backend.to_device)
    trace = Traced(backend, state.weights, **options)
    return step(RUN, trace, state, tiny.windows(RUN, 0, 2), memory=plan).state, trace


@pytest.fixture(scope="module")
def expected() -> list[Operation]:
    return traced(REFERENCE)[1].trace()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_one_trace_whatever_computes_it(expected: list[Operation], name: str, plan: MemoryPlan) -> None:
    root, found = traced(kernels.backend(name), plan)
    plain = initial_state(RUN, REFERENCE)
    assert root == step(RUN, REFERENCE, plain, tiny.windows(RUN, 0, 2)).state  # looking on changes nothing
    assert found.trace() == expected and first_difference(found.trace(), expected) is None


def test_an_ordered_reduction_has_one_trace_too() -> None:
    """Its units' sums come and go, and what takes their memory must not take their names."""
    order = Ordered(kind="ordered", replicas=2, shards=1, residual="left_fold")
    run = tiny.spec(seq_len=32, windows=4, numerics=NumericsSpec(reduction=order))
    traces = []
    for name in BACKENDS:
        backend = kernels.backend(name)
        state = initial_state(run, REFERENCE).placed(backend.to_device)
        trace = Traced(backend, state.weights)
        step(run, trace, state, tiny.windows(run, 0, 4))
        traces.append(trace.trace())
    assert traces[0] == traces[1] == traces[2]
    assert {operation.unit for operation in traces[0]} == {None, 0, 1, 2, 3}
    assert {o.about for o in traces[0] if o.name == "square_rows"} == {""}


def test_every_operation_and_parameter_is_named(expected: list[Operation]) -> None:
    assert {operation.name for operation in expected} == set(KINDS) - {"head"}  # evaluation's alone
    for name, places in {"adamw": None, "quantise_weight": None, "embed_backward": {0, 1}}.items():
        assert {o.unit for o in expected if o.name == name} == ({None} if places is None else places)
    assert [o.about for o in expected if o.name == "adamw"] == sorted(RUN.model.shapes())
    assert [o.about for o in expected if o.name == "square_rows"] == sorted(RUN.model.shapes())
    backward = {part for o in expected if "backward" in o.name and o.unit == 0 for part in o.about.split("+")}
    assert backward >= set(RUN.model.shapes())
    assert all(o.about for o in expected if o.name != "fixed_sum")


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("project", 4, "project of blocks.001.q, unit 0"),
        ("head_backward", 1, "head_backward of head, unit 1"),
        ("square_rows", 0, "square_rows of "),
        ("adamw", 27, "adamw of "),
    ],
)
def test_the_first_wrong_operation_is_named_and_refereed(
    expected: list[Operation], name: str, call: int, said: str
) -> None:
    accused = traced(Wrong(kernels.backend("cpu"), name, call))[1].trace()
    judge = traced(kernels.backend("cpu"), other=accused, referee=REFERENCE)[1]
    difference = first_difference(judge.trace(), accused)
    assert difference and difference.ours and difference.computed and str(difference).startswith(said)
    assert judge.by_referee[difference.ours] == difference.ours.outputs
    if name != "square_rows":  # which need not be the first by name
        wrong = traced(Wrong(kernels.backend("cpu"), name, call), other=expected, referee=REFERENCE)[1]
        found = first_difference(wrong.trace(), expected)
        assert found and found.ours and found.theirs and wrong.by_referee[found.ours] == found.theirs.outputs


def test_other_windows_are_a_difference_of_inputs(expected: list[Operation]) -> None:
    state = initial_state(RUN, REFERENCE)
    trace = Traced(REFERENCE, state.weights, other=expected, referee=REFERENCE)
    step(RUN, trace, state, tiny.windows(RUN, 1, 2))
    difference = first_difference(trace.trace(), expected)
    assert difference and not difference.computed and str(difference) == "the inputs of embed of embed, unit 0"
    assert trace.by_referee == {}


def test_a_trace_that_ends_early(expected: list[Operation]) -> None:
    for ours, theirs in ((expected, expected[:-1]), (expected[:-1], expected)):
        difference = first_difference(ours, theirs)
        assert difference and not difference.computed and "the end" in str(difference)


def test_what_is_done_again_must_come_out_again() -> None:
    unsteady = Wrong(kernels.backend("cpu"), "project", 15)  # the first that is recomputed, by the plan
    assert 15 == 4 * RUN.model.layers + 3
    with pytest.raises(Unsteady, match=r"project of blocks\.002\.gate_up, unit 0 gave"):
        traced(unsteady, MemoryPlan(recompute=1, hold_codes=False))


def test_digests_are_of_values_and_not_of_a_backends_types() -> None:
    first, second = (Traced(kernels.backend(name), {}) for name in ("cpu", "generic:cpu"))
    for backend in (first, second):
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        backend.fixed_sum(backend.to_device(x), backend.new_flag())
    assert first.trace() == second.trace() != []
