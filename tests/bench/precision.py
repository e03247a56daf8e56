"""Which numerics to recommend: the recipe's choices against each other and against stock bf16, by held-out loss.

    python -m tests.bench.precision RESULTS.json [--backend nvidia] [--seconds 45 | --tokens N] [--limit 570]
    python -m tests.bench.precision RESULTS.json --tiny --backend cpu    # does it run at all? no GPU needed

107 M parameters (Open-1B's proportions at D 1,024 and 8 layers), windows of 4,096 tokens, eight to a step. Every arm
sees the same number of tokens, no window twice: as many as the slowest arm takes in --seconds. A seed draws the
initial weights and the order of the windows; arms of one seed share both. Then the two best choices of ours, the
fastest and the peer run again with other seeds. The peer (gpu_stock.py) keeps float32 parameters and rounds them to
bf16 where they are used, and has our schedule, AdamW constants, decay, clipping and z-loss.

RESULTS.json is written after each arm. Where it exists, its arms are not run again and its number of tokens holds;
an arm that would end after --limit seconds is left for the next call. Prints a Markdown table, then one JSON line.
What the text is, and its limits: python_text.py. The study is short, so it tells choices apart only where their
difference is well above that between seeds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import kernels
from kernels import canonical
from model.spec import ModelSpec, NumericsSpec, Phase, RunSpec, ScheduleSpec, SpikeSpec
from model.state import initial_state
from model.step import evaluate, step
from tests.bench.gpu_stock import Compiled, Trainer, device_of, parameters_of
from tests.bench.python_text import Corpus, corpus
from tests.bench.shapes import TINY

WINDOWS, UNIT_WINDOWS, HELD_OUT_WINDOWS = 8, 4, 64
SHAPE = {"d_model": 1024, "layers": 8, "heads": 8, "kv_heads": 2, "head_dim": 128, "ffn": 2816}
LAST = 50  # steps whose mean training loss is reported
STOCK = "stock bf16"
ONE: dict[str, Any] = {"weight_scale": "lsq", "input_gradient_slices": 1, "weight_gradient_slices": 1, "down_slices": 1}
BOTH = {"input_gradient_slices": 2, "weight_gradient_slices": 2}
CHOICES: dict[str, dict[str, Any]] = {
    "lsq": ONE,
    "max": {**ONE, "weight_scale": "max"},
    "lsq, gradients in 2 slices": {**ONE, **BOTH},
    "max, gradients in 2 slices": {**ONE, **BOTH, "weight_scale": "max"},
    "lsq, dX in 2 slices": {**ONE, "input_gradient_slices": 2},
    "lsq, dW in 2 slices": {**ONE, "weight_gradient_slices": 2},
    "lsq, down's input in 2 slices": {**ONE, "down_slices": 2},
}
SLOWEST = "lsq, gradients in 2 slices"
FASTEST = "lsq"
FIRST_SEED, OTHER_SEEDS = 1, (2, 3)
Arm = dict[str, Any]


class Study:
    """The arms run so far, and what all of them share."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.began = asked, time.perf_counter()
        self.backend: ModuleType = kernels.backend(asked.backend)
        self.device = device_of(self.backend)
        self.text: Corpus = corpus(TINY.seq_len if asked.tiny else 4096, HELD_OUT_WINDOWS, 60 if asked.tiny else None)
        shape = TINY.model_dump() if asked.tiny else SHAPE
        self.model = ModelSpec(**{**shape, "vocab": self.text.vocab})
        self.say(f"{self.text.size / 1e6:.0f} MB, {self.text.train.size / 1e6:.1f} M tokens, {self.text.tokenizer}")
        shared = {"model": self.model.model_dump(), "data": self.text.digest, "windows": WINDOWS}
        self.results = self._results(shared)

    def _results(self, shared: dict[str, Any]) -> dict[str, Any]:
        """Those of an earlier call, or new ones with the number of tokens of every arm."""
        path: Path = self.asked.results
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            different = [name for name in shared if found[name] != shared[name]]
            if different or self.asked.tokens not in (None, found["tokens"]):
                raise SystemExit(f"{path} is of another study: {different or ['tokens']} differ; name another file")
            return found
        limit = len(self.text.train) // WINDOWS * WINDOWS * self.model.seq_len
        tokens = min(self.asked.tokens or self._affordable(), limit)
        size = WINDOWS * self.model.seq_len
        about = {"parameters": self.model.parameter_count(), "vocab": self.text.vocab, "tokenizer": self.text.tokenizer}
        about |= {"bytes_of_text": self.text.size, "tokens_of_text": self.text.train.size}
        return {**shared, **about, "tokens": max(1, tokens // size) * size, "arms": []}

    def _affordable(self) -> int:
        """How many tokens the slowest choice takes in the seconds asked for."""
        run = self.run(CHOICES[SLOWEST], FIRST_SEED, 1000 * WINDOWS * self.model.seq_len)
        state, batches = initial_state(run, self.backend).placed(self.backend.to_device), self.batches(FIRST_SEED, 1000)
        step(run, self.backend, state, next(batches))
        began, count = time.perf_counter(), 3
        for _ in range(count):
            step(run, self.backend, state, next(batches))
        rate = count * WINDOWS * self.model.seq_len / (time.perf_counter() - began)
        self.say(f"{SLOWEST}: {rate:,.0f} tokens/s")
        return int(rate * self.asked.seconds)

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def run(self, numerics: dict[str, Any], seed: int, tokens: int) -> RunSpec:
        """The run of an arm; no update is ever skipped for a large norm."""
        phases = (Phase(from_tokens=0, windows=WINDOWS),)
        rates: dict[str, Any] = {"peak_lr": "0.001", "warmup_tokens": tokens // 20, "total_tokens": tokens}
        return RunSpec(
            name="precision",
            seed=seed,
            model=self.model,
            numerics=NumericsSpec(**numerics, unit_windows=UNIT_WINDOWS),
            schedule=ScheduleSpec(**rates, phases=phases),
            spike=SpikeSpec(norm="16384"),
        )

    def batches(self, seed: int, steps: int) -> Iterator[np.ndarray]:
        """The windows of each step, by a seed's order; again from the start only where a trial asks for too many."""
        order = np.random.default_rng(seed).permutation(len(self.text.train))
        for number in range(steps):
            yield self.text.train[order[np.arange(number * WINDOWS, (number + 1) * WINDOWS) % len(order)]]

    def arm(self, name: str, seed: int) -> None:
        """Train and evaluate an arm, unless its result is there."""
        if any(arm["arm"] == name and arm["seed"] == seed for arm in self.results["arms"]):
            return
        tokens, began = self.results["tokens"], time.perf_counter()
        run = self.run(CHOICES.get(name, {}), seed, tokens)
        steps = tokens // (WINDOWS * self.model.seq_len)
        losses, held_out = (self.stock if name == STOCK else self.ours)(run, list(self.batches(seed, steps)))
        self.results["arms"].append(
            {
                "arm": name,
                "seed": seed,
                "held_out": held_out,
                "training": statistics.fmean(losses[-LAST:]),
                "losses": [round(loss, 4) for loss in losses[:: max(1, steps // 20)]],
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        self.asked.results.write_text(json.dumps(self.results), encoding="utf-8")
        self.say(f"{name}, seed {seed}: held-out {held_out:.4f}, {self.results['arms'][-1]['seconds']} s")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def ours(self, run: RunSpec, batches: list[np.ndarray]) -> tuple[list[float], float]:
        """(training losses, held-out loss) of our step; raises where a step was not finite."""
        state, losses = initial_state(run, self.backend).placed(self.backend.to_device), []
        for windows in batches:
            record = step(run, self.backend, state, windows)
            if record.loss is None or record.event:
                raise RuntimeError(f"step {record.step} of {run.numerics} is {record.event!r}: no result")
            losses.append(float(canonical.from_bits(record.loss)))
        held_out = evaluate(run, self.backend, state, self.text.held_out)
        if held_out is None:
            raise RuntimeError(f"the held-out loss of {run.numerics} is not finite: no result")
        return losses, float(canonical.from_bits(held_out))

    def stock(self, run: RunSpec, batches: list[np.ndarray]) -> tuple[list[float], float]:
        """(training losses, held-out loss) of the peer, from the same weights."""
        weights = initial_state(run, self.backend).weights
        parameters = parameters_of(self.backend, weights, self.device, torch.float32)
        compiled: Compiled = "blocks" if self.device.type == "cuda" else "no"
        trainer = Trainer(run, parameters, WINDOWS, compiled)
        losses = [trainer.step(windows) for windows in batches]
        return torch.stack(losses).tolist(), trainer.evaluate(self.text.held_out)

    def leaders(self) -> list[str]:
        """The two choices of ours with the lowest held-out loss of the first seed."""
        firsts = [arm for arm in self.results["arms"] if arm["arm"] in CHOICES and arm["seed"] == FIRST_SEED]
        return [arm["arm"] for arm in sorted(firsts, key=lambda arm: arm["held_out"])[:2]]

    def all_arms(self) -> bool:
        """Run what is left; whether all of it fitted."""
        for name in (*list(CHOICES)[:2], STOCK, *list(CHOICES)[2:]):
            if not self.fits():
                return False
            self.arm(name, FIRST_SEED)
        again = dict.fromkeys((STOCK, FASTEST, *self.leaders()))
        for seed, name in itertools.product(OTHER_SEEDS, again):
            if not self.fits():
                return False
            self.arm(name, seed)
        return True

    def fits(self) -> bool:
        """Whether another arm as long as the longest ends in time."""
        longest = max((arm["seconds"] for arm in self.results["arms"]), default=0)
        return time.perf_counter() - self.began + 1.1 * longest <= self.asked.limit


def table(results: dict[str, Any]) -> str:
    """The arms as Markdown: held-out and last training losses, and the difference to the peer of the same seed."""
    peers = {arm["seed"]: arm["held_out"] for arm in results["arms"] if arm["arm"] == STOCK}
    lines = [
        "| arm | seed | held-out loss | − stock bf16 | training loss, last steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for arm in sorted(results["arms"], key=lambda arm: (arm["seed"], arm["held_out"])):
        peer = peers.get(arm["seed"])
        difference = "" if peer is None else f"{arm['held_out'] - peer:+.4f}"
        row = (arm["arm"], arm["seed"], f"{arm['held_out']:.4f}", difference, f"{arm['training']:.4f}", arm["seconds"])
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the study that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--backend", default="nvidia")
    parser.add_argument("--seconds", type=float, default=45, help="of the slowest arm; sets the number of tokens")
    parser.add_argument("--tokens", type=int, help="of every arm, instead of --seconds")
    parser.add_argument("--limit", type=float, default=570, help="seconds of the whole call")
    parser.add_argument("--tiny", action="store_true", help="a shape and a text that any machine runs in a minute")
    study = Study(parser.parse_args())
    study.results["complete"] = study.all_arms()
    study.asked.results.write_text(json.dumps(study.results), encoding="utf-8")
    about = "{parameters:,} parameters, {tokens:,} tokens each of {tokens_of_text:,}; {tokenizer}"
    print(f"{about.format(**study.results)}\n\n{table(study.results)}\n")
    print(json.dumps(study.results))


if __name__ == "__main__":
    main()
