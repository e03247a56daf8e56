"""Batch phases and learning rate: pure functions of (spec, step), anchored to consumed tokens.

    tokens   0 ──────────── 4.0e9 ───────────────────── 3.6e11 ──── 4.0e11
    phase    |  768 windows  |       1,152 windows        |  2,304  | end
    step     0            1,272                        76,718    80,957

A step's phase follows from the tokens consumed before it; a phase therefore begins at the first step boundary on or
after its threshold, and the run ends at the first one on or after total_tokens. A window counts seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from model.host import MP, f32, real
from model.spec import RunSpec


@dataclass(frozen=True)
class PhaseStart:
    """Where a phase begins; one that is jumped over has no steps and is left out of the table."""

    phase: int
    windows: int
    first_step: int
    steps: int
    first_window: int
    tokens_before: int


@dataclass(frozen=True)
class StepPlan:
    """What step `step` reads: windows first_window … first_window + windows - 1 of the stream."""

    step: int
    phase: int
    first_window: int
    windows: int
    tokens_before: int
    tokens_after: int


@lru_cache(maxsize=64)
def phase_table(spec: RunSpec) -> tuple[PhaseStart, ...]:
    """The phases that the run really passes through, in closed form."""
    phases, seq_len = spec.schedule.phases, spec.model.seq_len
    ends = [phase.from_tokens for phase in phases[1:]] + [spec.schedule.total_tokens]
    table: list[PhaseStart] = []
    step, window = 0, 0
    for index, (phase, end) in enumerate(zip(phases, ends, strict=True)):
        left = end - window * seq_len
        if left <= 0:
            continue
        steps = -(-left // (phase.windows * seq_len))
        table.append(PhaseStart(index, phase.windows, step, steps, window, window * seq_len))
        step, window = step + steps, window + steps * phase.windows
    return tuple(table)


def total_steps(spec: RunSpec) -> int:
    """Number of steps of the run; steps are 0 … total_steps - 1."""
    last = phase_table(spec)[-1]
    return last.first_step + last.steps


def total_windows(spec: RunSpec) -> int:
    """Number of windows that the run reads."""
    last = phase_table(spec)[-1]
    return last.first_window + last.steps * last.windows


def total_tokens(spec: RunSpec) -> int:
    """Number of tokens that the run counts: seq_len to a window."""
    return total_windows(spec) * spec.model.seq_len


def plan(spec: RunSpec, step: int) -> StepPlan:
    """The plan of one step, in time independent of the step; raises IndexError outside the run."""
    steps = total_steps(spec)
    if not 0 <= step < steps:
        raise IndexError(f"step {step} is outside run {spec.name!r}: its {steps:,} steps are 0 to {steps - 1}")
    phase = next(entry for entry in reversed(phase_table(spec)) if entry.first_step <= step)
    first = phase.first_window + (step - phase.first_step) * phase.windows
    seq_len = spec.model.seq_len
    return StepPlan(step, phase.phase, first, phase.windows, first * seq_len, (first + phase.windows) * seq_len)


def step_of(spec: RunSpec, window: int) -> int:
    """The step that reads a window of the stream, in constant time; raises IndexError outside the run."""
    end = total_windows(spec)
    if not 0 <= window < end:
        raise IndexError(f"window {window} is outside run {spec.name!r}: its {end:,} windows are 0 to {end - 1}")
    phase = next(entry for entry in reversed(phase_table(spec)) if entry.first_window <= window)
    return phase.first_step + (window - phase.first_window) // phase.windows


def learning_rate(spec: RunSpec, tokens_before: int) -> np.float32:
    """Rate of a step that starts after tokens_before tokens, rounded once to float32.

    Linear from 0 over warmup_tokens, then floor + (peak - floor)·(1 + cos π·x)/2 with x the share of the tokens left
    that is consumed; the floor from total_tokens on. Skipped updates do not stop this clock.
    """
    schedule = spec.schedule
    if tokens_before < 0:
        raise ValueError(f"tokens_before is {tokens_before}; a run starts at 0")
    peak = real(schedule.peak_lr)
    if tokens_before < schedule.warmup_tokens:
        return f32(peak * tokens_before / schedule.warmup_tokens)
    if tokens_before == schedule.warmup_tokens:
        return f32(schedule.peak_lr)
    floor = peak * real(schedule.floor_ratio)
    if tokens_before >= schedule.total_tokens:
        return f32(floor)
    share = MP.mpf(tokens_before - schedule.warmup_tokens) / (schedule.total_tokens - schedule.warmup_tokens)
    return f32(floor + (peak - floor) * (1 + MP.cospi(share)) / 2)
