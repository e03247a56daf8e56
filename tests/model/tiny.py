"""A run small enough to train in a test."""

from typing import Any

import numpy as np

from kernels.reference.philox import words
from model.spec import ModelSpec, NumericsSpec, Phase, RunSpec, ScheduleSpec, SpikeSpec

VOCAB = 97
LEAST = NumericsSpec(weight_scale="max", weight_gradient_slices=1)


def spec(
    seq_len: int = 128,
    windows: int = 2,
    steps: int = 100,
    peak_lr: str = "0.003",
    numerics: NumericsSpec | None = None,
    spike: SpikeSpec | None = None,
    **shape: Any,
) -> RunSpec:
    """Two local layers and a full one, three query heads on one key head, everything of odd size."""
    sizes: dict[str, Any] = {"vocab": VOCAB, "d_model": 48, "layers": 3, "ffn": 80}
    heads = {"heads": 3, "kv_heads": 1, "head_dim": 16}
    model = ModelSpec(**{**sizes, **heads, "seq_len": seq_len, "window": min(32, seq_len), "full_every": 2, **shape})
    step_tokens = seq_len * windows
    return RunSpec(
        name="tiny",
        seed=1,
        model=model,
        numerics=numerics or LEAST,
        schedule=ScheduleSpec(
            peak_lr=peak_lr,
            warmup_tokens=min(10, steps) * step_tokens,
            total_tokens=steps * step_tokens,
            phases=(Phase(from_tokens=0, windows=windows),),
        ),
        spike=spike or SpikeSpec(),
    )


def windows(run: RunSpec, first: int, count: int) -> np.ndarray:
    """Windows first … first+count−1 of a stream, int64[count, seq_len + 1]: each repeats a phrase of its own, so
    attention helps."""
    length, phrase = run.model.seq_len + 1, 11
    draw = words(run.seed, "tiny stream", first * phrase, count * phrase).astype(np.int64).reshape(count, phrase)
    return np.take(draw >> 16, np.arange(length) % phrase, axis=1) % run.model.vocab
