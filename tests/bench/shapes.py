"""The two models that are timed: about 10 M and 120 M parameters, windows of 4,096 tokens."""

from __future__ import annotations

from typing import Any

from model.spec import ModelSpec, Phase, RunSpec, ScheduleSpec

TOKENS = 4096
SHAPES: dict[str, dict[str, int]] = {
    "10M": {"vocab": 8192, "d_model": 256, "layers": 6, "heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 704},
    "120M": {"vocab": 32768, "d_model": 768, "layers": 12, "heads": 12, "kv_heads": 3, "head_dim": 64, "ffn": 2048},
}


def spec(size: str, windows: int = 1) -> RunSpec:
    """A run of one of the shapes, `windows` to a step."""
    shape: dict[str, Any] = {**SHAPES[size], "seq_len": TOKENS, "window": 512, "full_every": 5}
    phases = (Phase(from_tokens=0, windows=windows),)
    rates = {"peak_lr": "0.0001", "warmup_tokens": 0, "total_tokens": TOKENS * windows * 1000}
    return RunSpec(name="bench", seed=1, model=ModelSpec(**shape), schedule=ScheduleSpec(**rates, phases=phases))
