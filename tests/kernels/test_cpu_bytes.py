"""The CPU backend gives the reference's bytes: sizes around blocks, extreme values, one and two slices, any threads."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

from kernels import cpu, reference
from kernels.cpu import products
from kernels.interface import AdamScalars, GradientSlices, Part, Rope, Rows, Weight

F32 = np.float32
EPS = F32(1e-5)
SIZES = (1, 2, 63, 64, 65, 127, 128, 129)
# Rows and columns vary independently: each size meets several others.
SHAPES = tuple((rows, SIZES[(i * 3 + shift) % len(SIZES)]) for i, rows in enumerate(SIZES) for shift in (0, 1, 5))
EXTREMES = tuple(
    F32(x)
    for x in (0.0, -0.0, 2.0**-64, np.nextafter(F32(2.0**-64), F32(0)), -(2.0**-100), 2.0**-101, 1e-42, -1e30, 1e38)
)
NOT_FINITE = tuple(F32(x) for x in (np.inf, -np.inf, np.nan))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Extreme values overflow on purpose; afterwards all threads and the probed product are back."""
    threads, method = numba.get_num_threads(), products.method()
    with np.errstate(all="ignore"):
        yield
    numba.set_num_threads(threads)
    products.use(method)


def normals(seed: int, *shape: int) -> np.ndarray:
    """Ordinary values, some rows tiny, some large."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape).astype(F32)
    if len(shape) == 2:
        x *= np.exp2(random.integers(-12, 6, (shape[0], 1))).astype(F32)
    return x


def spoiled(x: np.ndarray, values: tuple[np.float32, ...], seed: int) -> np.ndarray:
    """A copy with some of its elements, and one whole row, replaced by these values."""
    random = np.random.default_rng(seed)
    x = x.copy()
    flat = x.reshape(-1)
    flat[random.integers(0, flat.size, len(values))] = values
    if x.ndim == 2:
        x[random.integers(0, len(x))] = values[seed % len(values)]
    return x


def bf16(x: np.ndarray) -> np.ndarray:
    return reference.numbers.bf16(np.ascontiguousarray(x, F32))


def rows(seed: int, count: int, width: int, slices: int) -> Rows:
    return reference.quantise_rows(bf16(normals(seed, count, width)), slices, np.zeros(1, np.int32))


class Pair(NamedTuple):
    """An argument of which each backend takes its own."""

    ours: Any
    theirs: Any


class Sums(NamedTuple):
    """An argument that the call adds to: int64 sums that did not start at zero, compared afterwards."""

    shape: tuple[int, ...]


class Flag:
    """The flag argument, compared afterwards."""


FLAG = Flag()


def weight(seed: int, out: int, width: int) -> Pair:
    w = normals(seed, out, width)
    return Pair(*(backend.quantise_weight(w, "max", np.zeros(1, np.int32)) for backend in (cpu, reference)))


def same(operation: str, *arguments: Any) -> None:
    """Both backends give results, sums and flags of the same dtypes, shapes and bytes."""
    ours, theirs = (results(backend, operation, arguments) for backend in (cpu, reference))
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (operation, number)
        assert a.tobytes() == b.tobytes(), f"{operation}, output {number}: {np.sum(a != b)} of {a.size} differ"


def results(backend: Any, operation: str, arguments: tuple[Any, ...]) -> list[np.ndarray]:
    changed: list[np.ndarray] = []
    given = [resolved(argument, backend, changed) for argument in arguments]
    return [*flatten(getattr(backend, operation)(*given)), *changed]


def resolved(argument: Any, backend: Any, changed: list[np.ndarray]) -> Any:
    """The argument for this backend; what the call may change is noted."""
    if isinstance(argument, Pair):
        return argument.ours if backend is cpu else argument.theirs
    if isinstance(argument, Flag | Sums):
        shape = (1,) if isinstance(argument, Flag) else argument.shape
        start = 0 if isinstance(argument, Flag) else 7
        changed.append(np.full(shape, start, np.int32 if isinstance(argument, Flag) else np.int64))
        return changed[-1]
    if isinstance(argument, Part):
        return Part(*(resolved(field, backend, changed) for field in argument))
    if isinstance(argument, np.ndarray):
        return argument.copy()  # some results take an argument's place
    return tuple(resolved(item, backend, changed) for item in argument) if type(argument) is tuple else argument


def flatten(result: Any) -> list[np.ndarray]:
    """The arrays of a result, without a weight's layout, which is a backend's own affair."""
    if isinstance(result, tuple):
        return [leaf for item in (result[:2] if isinstance(result, Weight) else result) for leaf in flatten(item)]
    return [] if result is None else [np.asarray(result)]


def inputs(x: np.ndarray) -> list[np.ndarray]:
    """An array as it is, with extreme finite values, and with values that are not finite."""
    return [x, spoiled(x, EXTREMES, 1), spoiled(x, NOT_FINITE, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantisers_and_sums(shape: tuple[int, int]) -> None:
    for x in inputs(normals(0, *shape)):
        same("fixed_sum", x, FLAG)
        for rule in ("max", "lsq"):
            same("quantise_weight", x, rule, FLAG)
        for slices in (1, 2):
            same("quantise_rows", bf16(x), slices, FLAG)


def test_a_weight_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean'"):
        cpu.quantise_weight(normals(0, 2, 2), "mean", np.zeros(1, np.int32))


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int]) -> None:
    gain = normals(1, shape[1])
    dy, residual = bf16(normals(2, *shape)), bf16(normals(3, *shape))
    bad = bf16(spoiled(normals(2, *shape), NOT_FINITE, 3))
    for values in inputs(normals(0, *shape)):
        x = bf16(values)
        for slices in (1, 2):
            same("norm_rows", x, gain, EPS, slices, FLAG)
        same("norm_bf16", x, gain, EPS, FLAG)
        _, r = reference.norm_rows(x, gain, EPS, 1, np.zeros(1, np.int32))
        for other in (None, residual):
            same("norm_backward", dy, x, r, gain, other, Sums((shape[1],)), FLAG)
        same("norm_backward", bad, x, r, gain, residual, Sums((shape[1],)), FLAG)


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (63, 3, 64), (130, 2, 62), (65, 1, 128)])
def test_rotation(tokens: int, heads: int, width: int) -> None:
    angle = np.outer(np.arange(13), np.arange(1, width // 2 + 1)) * 0.1
    rope = Rope(np.cos(angle).astype(F32), np.sin(angle).astype(F32))
    dz = normals(1, tokens * heads, width)
    for values in inputs(normals(0, tokens, heads * width)):
        y = bf16(values)
        for query in (False, True):
            same("rotate_rows", y, rope, EPS, query, FLAG)
        for d in inputs(dz):
            same("rotate_backward", d, y, rope, EPS, FLAG)


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape: tuple[int, int]) -> None:
    tokens, width = shape
    for values in inputs(normals(0, tokens, 2 * width) * F32(8)):
        gate_up = bf16(values)
        for slices in (1, 2):
            same("swiglu_rows", gate_up, slices, FLAG)
        for dh in inputs(normals(1, *shape)):
            same("swiglu_backward", bf16(dh), gate_up)


@pytest.mark.parametrize("shape", SHAPES)
def test_embedding(shape: tuple[int, int]) -> None:
    tokens, width = shape
    chosen = np.random.default_rng(0).integers(0, 5, tokens)
    for table in inputs(normals(0, 5, width)):
        same("embed", table, chosen)
    for dx in inputs(normals(1, *shape)):
        same("embed_backward", bf16(dx), chosen, Sums((5, width)), FLAG)


def check_linear(tokens: int, inner: int, outs: tuple[int, ...], slices: int) -> None:
    """Each linear operation, with one weight a size of `outs` reading the same rows."""
    x, residual = rows(0, tokens, inner, slices), bf16(normals(5, tokens, outs[0]))
    weights = [weight(1 + i, out, inner) for i, out in enumerate(outs)]
    dys = [bf16(spoiled(normals(9 + i, tokens, out) * F32(1e-3), EXTREMES[:5], i)) for i, out in enumerate(outs)]
    same("project", x, weights[0])
    same("project_add", x, weights[0], residual)
    parts = tuple(Part(dy, w, Sums((dy.shape[1], inner))) for dy, w in zip(dys, weights))
    same("linear_backward", x, parts, GradientSlices(slices, slices), FLAG)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", list(products.METHODS))
def test_linear(shape: tuple[int, int], method: str) -> None:
    products.use(method)
    for slices in (1, 2):
        check_linear(*shape, (65, 1, 128)[: 1 + shape[0] % 3], slices)


@pytest.mark.parametrize("bad", [*NOT_FINITE, F32(1e30)])
def test_linear_gradients_that_are_not_finite_or_too_large(bad: np.float32) -> None:
    x, w, values = rows(0, 70, 66, 2), weight(1, 67, 66), normals(2, 70, 67)
    values[3, 4] = bad
    for slices in ((1, 1), (1, 2), (2, 1), (2, 2)):
        same("linear_backward", x, (Part(bf16(values), w, Sums((67, 66))),), GradientSlices(*slices), FLAG)


def check_head(x: Rows, w: Pair) -> None:
    (tokens, width), vocabulary = x.hi.shape, len(w.ours.scale)
    targets = np.random.default_rng(0).integers(0, vocabulary, tokens)
    same("head", x, w, targets, FLAG)
    for two_z in (F32(0), F32(2e-4)):
        same("head_backward", x, w, targets, two_z, Sums((vocabulary, width)), FLAG)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", list(products.METHODS))
def test_head(shape: tuple[int, int], method: str) -> None:
    products.use(method)
    tokens, vocabulary = shape
    for slices, width in ((1, 64), (2, 33)):
        check_head(rows(0, tokens, width, slices), weight(1, vocabulary, width))


@pytest.mark.parametrize("scale", [0.0, 2.0**-70, 1e30, np.inf, np.nan])
def test_head_on_extreme_rows(scale: float) -> None:
    x, w = rows(0, 66, 64, 2), weight(1, 70, 64)
    x.scale[3], x.scale[65] = scale, scale
    check_head(x, w)
    zero = Weight(w.theirs.hi, w.theirs.scale * F32(0))
    check_head(x, Pair(zero, zero))


@pytest.mark.parametrize("wild", [1.0, np.inf])
def test_head_over_several_chunks_and_blocks(wild: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither chunks of tokens nor blocks of the vocabulary show, also where a token's logits are not finite."""
    module = importlib.import_module("kernels.cpu.head")
    sizes = {"CHUNK_LOGITS": 1 << 16, "CHUNK_TOKENS": 7, "BLOCK_COLUMNS": 33, "BLOCK_TOKENS": 100}
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    x = rows(0, 1100, 32, 2)
    x.scale[[5, 700]] = wild
    check_head(x, weight(1, 130, 32))


@pytest.mark.parametrize("shape", [(1,), (129,), (1, 1), (64, 129), (127, 2), (3, 5, 7)])
def test_optimizer(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    sums = random.integers(-(2**40), 2**40, shape) >> random.integers(0, 40, shape)
    sums.reshape(-1)[0] = 2**62 + 2**38 + 1  # a number that rounds up only if it rounds once
    scalars = AdamScalars(*(F32(x) for x in (2**-36, 0.7, 3e-4, 0.99997, 0.9, 0.1, 0.95, 0.05, 5.26, 10.3, 1e-8)))
    p, m, v = (spoiled(normals(i, *shape) * F32(0.02), EXTREMES[:7], i) for i in range(3))
    ours, theirs = ([p.copy(), m.copy(), np.abs(v * F32(1e-4))] for _ in range(2))
    for _ in range(3):
        cpu.adamw(*ours, sums, scalars)
        reference.adamw(*theirs, sums, scalars)
        assert [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]
    same("square_rows", sums, F32(2.0**-36))


@pytest.mark.parametrize("shape", [(1,), (5,), (127, 129), (2, 3, 4)])
@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_initial_weights(shape: tuple[int, ...], seed: int) -> None:
    same("initial_weights", seed, "blocks.000.q", shape, F32(0.02))


def test_a_seed_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2\^64"):
        cpu.initial_weights(2**64, "q", (1,), F32(1))


def test_adamw_refuses_arrays_that_it_would_copy() -> None:
    p, sums = np.zeros((4, 6), F32)[:, ::2], np.zeros((4, 3), np.int64)
    with pytest.raises(ValueError, match="contiguous"):
        cpu.adamw(p, p, p, sums, AdamScalars(*(F32(1),) * 11))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_whole_window_with_any_number_of_threads(threads: int) -> None:
    """One of the paper's faults showed only at the full length of 4,096 tokens."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    check_linear(4096, 96, (160, 48), 1)
    check_head(rows(0, 4096, 48, 2), weight(1, 300, 48))
    x, dy, gain = bf16(normals(3, 4096, 96)), bf16(normals(2, 4096, 96)), normals(1, 96)
    _, r = reference.norm_rows(x, gain, EPS, 1, np.zeros(1, np.int32))
    same("norm_backward", dy, x, r, gain, dy, Sums((96,)), FLAG)


def test_threads_of_the_caller_wait_for_each_other() -> None:
    """Numba would end the whole process here."""
    x = bf16(normals(0, 300, 64))
    results: list[bytes] = []

    def call() -> None:
        results.extend(cpu.quantise_rows(x, 1, cpu.new_flag()).hi.tobytes() for _ in range(50))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 150
    assert len(set(results)) == 1
