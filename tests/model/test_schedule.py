"""Phases and rates: the paper's numbers, and the closed form against a walk over every step."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from model import schedule
from model.host import f32
from model.spec import RunSpec
from tests.model.recipes import changed, run_section, run_spec


def with_phases(total: int, phases: list[tuple[int, int]], warmup: int = 0) -> RunSpec:
    section = changed(run_section("demo"), "schedule.phases", [{"from_tokens": t, "windows": w} for t, w in phases])
    section = changed(section, "schedule.warmup_tokens", warmup)
    return RunSpec.model_validate(changed(section, "schedule.total_tokens", total))


def walk(spec: RunSpec) -> list[schedule.StepPlan]:
    """The plans as the rule itself gives them: one step after another."""
    plans: list[schedule.StepPlan] = []
    tokens = window = 0
    while tokens < spec.schedule.total_tokens:
        index = max(i for i, phase in enumerate(spec.schedule.phases) if phase.from_tokens <= tokens)
        windows = spec.schedule.phases[index].windows
        after = tokens + windows * spec.model.seq_len
        plans.append(schedule.StepPlan(len(plans), index, window, windows, tokens, after))
        tokens, window = after, window + windows
    return plans


def test_open_1b_has_the_papers_schedule() -> None:
    spec = run_spec("open_1b")
    assert schedule.total_steps(spec) == 80_957
    assert schedule.total_tokens(spec) == 400_004_481_024
    assert schedule.total_windows(spec) == 97_657_344
    assert [phase.first_step for phase in schedule.phase_table(spec)] == [0, 1_272, 76_718]
    assert schedule.plan(spec, 1_272).tokens_before == 4_001_366_016
    assert schedule.plan(spec, 76_718).tokens_before == 360_000_258_048
    assert schedule.plan(spec, 80_956).tokens_after == 400_004_481_024


def test_open_1b_rate_is_zero_at_first_and_the_peak_at_step_667() -> None:
    spec = run_spec("open_1b")
    rates = [schedule.learning_rate(spec, schedule.plan(spec, step).tokens_before) for step in range(670)]
    assert rates[0] == 0
    assert rates[667] == f32("0.00045") and max(rates[:667]) < rates[667] and rates[669] <= rates[667]
    assert schedule.learning_rate(spec, 400_000_000_000) == f32("0.000045")
    assert schedule.learning_rate(spec, 10**15) == f32("0.000045")


def test_the_demo_runs_forty_steps_and_crosses_a_phase_at_step_30() -> None:
    spec = run_spec("demo")
    assert schedule.total_steps(spec) == 40
    assert [schedule.plan(spec, step).windows for step in (0, 29, 30, 39)] == [2, 2, 3, 3]
    assert schedule.learning_rate(spec, schedule.plan(spec, 12).tokens_before) == f32("0.005")


@pytest.mark.parametrize(
    ("total", "phases"),
    [
        (1, [(0, 1)]),
        (4096 * 10, [(0, 3)]),
        (4096 * 10 + 1, [(0, 3), (4096 * 4, 1), (4096 * 7, 5)]),
        (100_000, [(0, 8), (1, 2), (50_000, 3)]),  # one step passes the second threshold
        (100_000, [(0, 20), (10, 7), (20, 1), (99_999, 2)]),  # the second and third phase are jumped over
    ],
)
def test_closed_form_is_the_walk(total: int, phases: list[tuple[int, int]]) -> None:
    spec = with_phases(total, phases)
    plans = walk(spec)
    assert [schedule.plan(spec, step) for step in range(len(plans))] == plans
    assert schedule.total_steps(spec) == len(plans)
    assert schedule.total_tokens(spec) == plans[-1].tokens_after


@pytest.mark.parametrize("step", [-1, 40, 10**9])
def test_a_step_outside_the_run_is_an_error_that_names_the_run(step: int) -> None:
    with pytest.raises(IndexError, match=rf"step {step} is outside run 'demo': its 40 steps are 0 to 39"):
        schedule.plan(run_spec("demo"), step)


def test_without_a_warm_up_the_first_rate_is_the_peak() -> None:
    assert schedule.learning_rate(with_phases(100_000, [(0, 1)]), 0) == f32("0.005")


def test_rates_are_the_formula_rounded_once() -> None:
    spec = run_spec("open_1b")
    rng = np.random.default_rng(1)
    with mpmath.workdps(60):
        peak, warmup, total = mpmath.mpf("0.00045"), 2_098_200_576, 400_000_000_000
        for tokens in rng.integers(0, total, 300).tolist():
            share = mpmath.mpf(tokens - warmup) / (total - warmup)
            cosine = peak / 10 + peak * 9 / 10 * (1 + mpmath.cos(mpmath.pi * share)) / 2
            expected = f32(peak * tokens / warmup if tokens < warmup else cosine)
            assert schedule.learning_rate(spec, tokens) == expected


def test_the_step_of_every_window() -> None:
    spec = with_phases(total=4096 * 60, phases=[(0, 3), (4096 * 10, 7), (4096 * 40, 2)])
    of = [plan.step for plan in walk(spec) for _ in range(plan.windows)]
    assert [schedule.step_of(spec, window) for window in range(len(of))] == of
    for outside in (-1, len(of)):
        with pytest.raises(IndexError, match=f"window {outside} is outside run"):
            schedule.step_of(spec, outside)
    paper = run_spec("open_1b")
    assert schedule.step_of(paper, schedule.plan(paper, 41_000).first_window) == 41_000
    assert schedule.step_of(paper, schedule.plan(paper, 41_000).first_window - 1) == 40_999
