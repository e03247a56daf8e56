"""The spike protocol, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import canonical
from model.host import f32
from model.spec import SpikeSpec
from model.spike import SpikeState, decide

SPEC = SpikeSpec()  # norm 5.0 from step 1,000; cooldown 4; halt at 5 events within 100 steps
CALM, HIGH = np.float32(0.2), np.float32(5.5)


def play(norms: dict[int, np.float32 | None], first: int, last: int, spec: SpikeSpec = SPEC) -> dict[int, str]:
    """Step → event for every step whose event is not "", with the halting step's marked "halt"."""
    state, events = SpikeState(), {}
    for step in range(first, last):
        state, event, halt = decide(spec, state, step, norms.get(step, CALM))
        if event:
            events[step] = "halt" if halt else event
    return events


def test_one_spike_skips_five_updates() -> None:
    assert play({1_782: HIGH}, 1_700, 1_900) == {1_782: "spike"} | dict.fromkeys(range(1_783, 1_787), "cooldown")


def test_the_norm_counts_only_from_its_first_step() -> None:
    assert play({999: HIGH}, 990, 1_010) == {}
    assert play({1_000: HIGH}, 990, 1_001) == {1_000: "spike"}


@pytest.mark.parametrize("norm", [None, np.float32("nan"), np.float32("inf")])
def test_what_is_not_finite_counts_at_any_step(norm: np.float32 | None) -> None:
    assert play({3: norm}, 0, 20) == {3: "nonfinite"} | dict.fromkeys(range(4, 8), "cooldown")


def test_a_norm_beyond_two_to_the_14_counts_at_any_step() -> None:
    limit = np.float32(2.0**14)
    assert play({3: limit}, 0, 5) == {}
    assert play({3: np.nextafter(limit, np.float32(np.inf))}, 0, 4) == {3: "spike"}


def test_the_threshold_itself_is_no_spike() -> None:
    assert play({2_000: f32("5.0")}, 2_000, 2_001) == {}
    assert play({2_000: np.nextafter(f32("5.0"), np.float32(9))}, 2_000, 2_001) == {2_000: "spike"}


def test_a_trigger_during_the_cooldown_is_absorbed() -> None:
    norms: dict[int, np.float32 | None] = {2_000: HIGH, 2_001: HIGH, 2_004: None}
    assert play(norms, 2_000, 2_020) == {2_000: "spike"} | dict.fromkeys(range(2_001, 2_005), "cooldown")
    assert play(norms | {2_005: HIGH}, 2_000, 2_006)[2_005] == "spike"


def test_five_fresh_events_within_a_hundred_steps_halt() -> None:
    starts = [2_000, 2_025, 2_050, 2_075, 2_099]
    events = play(dict.fromkeys(starts, HIGH), 2_000, 2_100)
    assert events[2_099] == "halt" and list(events.values()).count("spike") == 4
    starts[-1] = 2_100  # the first one is now a hundred steps back
    assert "halt" not in play(dict.fromkeys(starts, HIGH), 2_000, 2_110).values()


def test_absorbed_triggers_do_not_halt() -> None:
    assert "halt" not in play(dict.fromkeys(range(2_000, 2_020), HIGH), 2_000, 2_020).values()
    assert play(dict.fromkeys(range(2_000, 2_025), HIGH), 2_000, 2_021)[2_020] == "halt"


def test_the_state_forgets_what_no_longer_counts() -> None:
    state = SpikeState()
    for step in range(2_000, 2_200):
        state, _, _ = decide(SPEC, state, step, HIGH if step == 2_000 else CALM)
        assert state.events == ((2_000,) if step < 2_099 else ())


def test_a_cooldown_of_zero_skips_one_update() -> None:
    assert play({2_000: HIGH}, 1_990, 2_010, SpikeSpec(cooldown=0)) == {2_000: "spike"}


def test_the_state_has_a_canonical_form() -> None:
    state = SpikeState(3, (17, 42))
    assert canonical.dumps(state.scalars()) == b'{"cooldown":3,"events":[17,42]}'
    assert SpikeState.of(canonical.loads(canonical.dumps(state.scalars()))) == state
    with pytest.raises(ValueError, match="expected"):
        SpikeState.of({"cooldown": 3})
