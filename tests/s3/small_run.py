"""A small run whose checkpoints are long objects, which a store at s3:// sends in parts; and what lies in a bucket."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.flows import tiny
from tests.flows.conftest import verbatim
from tests.s3.server import BUCKET, Server, client

STEPS, EVERY = 4, 2  # a checkpoint every 2 steps


def train(folder: Path, seed: int = 7, mix: Path | None = None) -> Path:
    """A run of 0.8 million parameters by its commands; returns its folder. seed: another makes another run; mix: one
    that is prepared already."""
    plain = yaml.safe_load(tiny.recipe(folder / "text").read_text(encoding="utf-8"))
    plain["mix"]["shard_windows"] = 4096
    plain["run"]["seed"] = seed
    plain["run"]["model"] |= {"vocab": 6000, "d_model": 64}  # many parameters, and little to compute with them
    phases = [{"from_tokens": 0, "windows": 1}]
    plain["run"]["schedule"] |= {"warmup_tokens": 128, "total_tokens": STEPS * 128, "phases": phases}
    plain["plan"] = {"checkpoint_every": EVERY, "diagnostics_every": 2}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(plain), encoding="utf-8")
    if mix:
        shutil.copytree(mix, folder / "mix")
    else:
        verbatim("prepare", recipe, "--folder", folder)
    verbatim("train", recipe, "--folder", folder, "--backend", "reference")
    return folder


def address(name: str) -> str:
    """Of a store of that name in the tests' bucket."""
    return f"s3://{BUCKET}/{name}"


def content(server: Server, name: str) -> dict[str, bytes]:
    """Every object of that store, hidden ones too, as a plain client sees it: key → bytes."""
    plain, found = client(server), {}
    for page in plain.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{name}/"):
        for entry in page.get("Contents", []):
            body = plain.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
            found[entry["Key"].removeprefix(f"{name}/")] = body
    return found
