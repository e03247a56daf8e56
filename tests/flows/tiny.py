"""A whole recipe in miniature: two made-up sources of 400 kB, windows of 129 tokens, about 40,000 parameters."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import yaml

STEPS = 12


def text(seed: int, size: int) -> str:
    """About `size` bytes of sentences over a small made-up vocabulary; a function of the seed alone."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(400)]
    lines, length = [], 0
    while length < size:
        line = " ".join(draw.choices(words, k=draw.randint(4, 14))) + "."
        lines.append(line)
        length += len(line) + 1
    return "\n".join(lines)


def recipe(folder: Path) -> Path:
    """Write two source files and recipe.yaml into `folder`; returns the recipe's path."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [{"name": name, "files": [_file(folder, name, seed)]} for seed, name in enumerate(("alpha", "beta"))]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"mix": _mix(sources), "run": _run(), "plan": _plan()}), encoding="utf-8")
    return path


def _file(folder: Path, name: str, seed: int) -> dict[str, Any]:
    path = folder / f"{name}.jsonl"
    documents = text(seed, 400_000).split("\n")
    rows = [f'{{"text": "{" ".join(documents[i : i + 2])}"}}' for i in range(0, len(documents), 2)]
    data = "\n".join(rows).encode()
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    pin = {"kind": "local", "path": str(path), "size": len(data), "sha256": digest, "licence": "none"}
    return pin | {"extract": {"kind": "rows"}}


def _mix(sources: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = {"kind": "train", "vocab": 300, "sample_bytes": 100_000}
    cut = {"seed": 1, "seq_len": 128, "shard_windows": 64, "held_out_windows": 16, "block": 16}
    return cut | {"tokenizer": tokenizer, "sources": sources}


def _run() -> dict[str, Any]:
    shape = {"vocab": 300, "d_model": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 48}
    model = shape | {"seq_len": 128, "window": 32, "full_every": 2}
    phases = [{"from_tokens": 0, "windows": 2}]
    schedule = {"peak_lr": "0.003", "warmup_tokens": 512, "total_tokens": STEPS * 256, "phases": phases}
    return {"name": "tiny", "seed": 7, "model": model, "schedule": schedule}


def _plan() -> dict[str, Any]:
    return {"checkpoint_every": 4, "diagnostics_every": 5, "segment_ends": [4]}
