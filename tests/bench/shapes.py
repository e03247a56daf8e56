"""The models that are timed, and runs of them."""

from __future__ import annotations

from typing import Any

from model.spec import ModelSpec, NumericsSpec, Phase, RunSpec, ScheduleSpec

TOKENS = 4096
# About 10 M and 120 M parameters, for processors.
SHAPES: dict[str, dict[str, int]] = {
    "10M": {"vocab": 8192, "d_model": 256, "layers": 6, "heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 704},
    "120M": {"vocab": 32768, "d_model": 768, "layers": 12, "heads": 12, "kv_heads": 3, "head_dim": 64, "ffn": 2048},
}
# 1.608 B parameters, for GPUs; the recipe's, by a test.
WIDTHS_1B = {"vocab": 128_256, "d_model": 2048, "heads": 16, "kv_heads": 4, "head_dim": 128, "ffn": 5632}
OPEN_1B = ModelSpec(**WIDTHS_1B, layers=24)
# Nothing to time: whether a benchmark runs at all.
TINY = ModelSpec(
    vocab=512, d_model=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=96, seq_len=64, window=16, full_every=2
)


def spec(size: str, windows: int = 1) -> RunSpec:
    """A run of one of SHAPES, `windows` to a step, with the demo's numerics."""
    shape: dict[str, Any] = {**SHAPES[size], "seq_len": TOKENS, "window": 512, "full_every": 5}
    return run_of(ModelSpec(**shape), windows, NumericsSpec(weight_scale="max", weight_gradient_slices=1))


def run_of(model: ModelSpec, windows: int, numerics: NumericsSpec) -> RunSpec:
    """A run of a thousand steps of so many windows."""
    rates = {"peak_lr": "0.0001", "warmup_tokens": 0, "total_tokens": model.seq_len * windows * 1000}
    schedule = ScheduleSpec(**rates, phases=(Phase(from_tokens=0, windows=windows),))
    return RunSpec(name="bench", seed=1, model=model, numerics=numerics, schedule=schedule)
