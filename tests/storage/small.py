"""A run small enough to train in milliseconds: a real mix, store and ledger; the step is a simple stand-in.

`with small.stand_in():` replaces the model behind `storage.engine`. Everything else is what runs in earnest.
"""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import numpy as np

from kernels import canonical, digest, reference
from model import schedule, spike
from model.spec import ModelSpec, Phase, RunSpec, ScheduleSpec, SpikeSpec
from model.state import State, root, zeros
from model.step import StepRecord, clip_factor
from storage import engine
from storage.audit import again, confirm
from storage.audit.keys import Key, load_or_create_key
from storage.corpus.prepare import prepare
from storage.corpus.spec import LocalFile, MixSpec, Rows, SourceSpec, TrainTokenizer
from storage.memory import Allocate
from storage.run import Run, create_run
from storage.store import Store
from storage.stream import Stream

SEQ_LEN = 16
STEPS = 12


def spec(**changes: Any) -> RunSpec:
    """12 steps: 2 windows each, 3 from step 8 on."""
    fields: dict[str, Any] = {
        "name": "small",
        "seed": 7,
        "model": ModelSpec(
            vocab=300, d_model=64, layers=1, heads=1, kv_heads=1, head_dim=64, ffn=32, seq_len=SEQ_LEN, window=8
        ),
        "schedule": ScheduleSpec(
            peak_lr="0.003",
            warmup_tokens=64,
            total_tokens=SEQ_LEN * 28,
            phases=(Phase(from_tokens=0, windows=2), Phase(from_tokens=SEQ_LEN * 16, windows=3)),
        ),
        "spike": SpikeSpec(norm="5.0", from_step=1, cooldown=1, halt_events=3, halt_within=12),
    }
    return RunSpec(**(fields | changes))


def mix(folder: Path, store: Store, seed: int = 3) -> Stream:
    """Two sources of made-up text, prepared into `store`."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = tuple(_source(folder, name, count) for name, count in (("verbs", 210), ("nouns", 90)))
    tokenizer = TrainTokenizer(vocab=300, sample_bytes=100_000)
    chosen = MixSpec(
        seed=seed, seq_len=SEQ_LEN, shard_windows=16, held_out_windows=8, block=10, tokenizer=tokenizer, sources=sources
    )
    prepare(chosen, folder, store)
    return Stream.open(store)


def _source(folder: Path, name: str, count: int) -> SourceSpec:
    rows = (" ".join(f"{name}{(row * word) % 101}" for word in range(3)) for row in range(count))
    text = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    path = folder / f"{name}.jsonl"
    path.write_bytes(text)
    file = LocalFile(
        kind="local",
        path=str(path),
        licence="CC0",
        extract=Rows(),
        size=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
    )
    return SourceSpec(name=name, files=(file,))


def begin(folder: Path, store: Store, mix_store: Store, **changes: Any) -> tuple[Run, Key]:
    """A new run of the small mix; to be called inside stand_in()."""
    stream = mix(folder / "sources", mix_store)
    key = load_or_create_key(folder / "keys", "trainer")
    run = create_run(store, stream, spec(**changes), key.public, engine.load_backend("cpu"), recipe=b"name: small\n")
    return run, key


@contextmanager
def stand_in(norms: dict[int, str] | None = None, flaw: int | None = None) -> Iterator[None]:
    """The stand-in model. norms: gradient norm by step, 1 elsewhere; flaw: a step that comes out wrong.

    A process of its own would know nothing of it, so a no-match is repeated in this one.
    """

    def do_step(spec: RunSpec, backend: ModuleType, state: State, windows: np.ndarray, **options: Any) -> StepRecord:
        norm = np.float32((norms or {}).get(state.step, "1"))
        return _step(spec, state, windows, norm, flaw == state.step, **options)

    with (
        mock.patch.object(confirm, "repeat", again.found),
        mock.patch.multiple(
            engine,
            step=do_step,
            initial_state=lambda spec, backend, moments=zeros: _initial(spec, moments),
            evaluate=_evaluate,
            load_backend=lambda name: reference,
            _self_test=lambda backend, report: [],
        ),
    ):
        yield


def _evaluate(
    spec: RunSpec, backend: ModuleType, state: State, windows: np.ndarray, memory: Any, group: Any, take: Any = None
) -> str:
    sums = windows.astype(np.int64).sum(axis=1) + int(state.weights["head"].astype(np.int64).sum())
    if take:
        take(sums)
    return canonical.bits(np.float32(int(sums.sum()) % 97))


def _initial(spec: RunSpec, moments: Allocate) -> State:
    shapes = spec.model.shapes()
    weights = {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + np.float32(spec.seed + number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    return State(weights, *({name: moments(shape) for name, shape in shapes.items()} for _ in range(2)))


def _step(
    spec: RunSpec,
    state: State,
    windows: np.ndarray,
    norm: np.float32,
    flawed: bool,
    diagnose: bool = False,
    take: Any = None,
    memory: Any = None,
    group: Any = None,
) -> StepRecord:
    plan, number = schedule.plan(spec, state.step), int(windows.astype(np.int64).sum())
    sums = {name: np.full(weight.shape, number + i, np.int64) for i, (name, weight) in enumerate(state.weights.items())}
    state.spike, event, halt = spike.decide(spec.spike, state.spike, state.step, norm)
    if not event:
        state.updates += 1
        for name, gradient in sums.items():
            state.m[name][...] = gradient % 1000
            state.weights[name][...] -= state.m[name] / np.float32(1024)
    if flawed:
        state.weights["head"][3, 5] += np.float32(1)
    if take:
        take(sums)
    state.step, state.tokens, state.windows = state.step + 1, plan.tokens_after, plan.first_window + plan.windows
    gradients = {name: digest.tensor_digest(name, gradient) for name, gradient in sums.items()}
    state_root, tensors = root(state)
    return StepRecord(
        step=plan.step,
        tokens=plan.tokens_after,
        first_window=plan.first_window,
        windows=plan.windows,
        lr=canonical.bits(schedule.learning_rate(spec, plan.tokens_before)),
        loss=canonical.bits(np.float32(number % 89)),
        z_loss=canonical.bits(np.float32(0)),
        grad_norm=canonical.bits(norm),
        gradient=digest.root(gradients, {}),
        state=state_root,
        event=event,
        clipped=bool(not event and clip_factor(spec, norm) < 1),
        halt=halt,
        tensors=tensors,
        gradients=gradients,
        zero_gradients=(),
        diagnostics={"head": {"elements": 1}} if diagnose else None,
    )


def die_at_link(count: int, work: Callable[[], object]) -> NoReturn:
    """For a forked child: do the work, and die by SIGKILL where it would give its object number `count` a name."""
    real, left = os.link, count

    def link(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        real(*arguments, **options)

    os.link = link
    work()
    os._exit(0)
