"""The generic torch backend on the CPU: the vectors, its primitives against NumPy, devices whose own are wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import conformance, reference
from kernels.generic import attention, elementary, exact, head, numbers, optimizer, products
from kernels.interface import AttentionShape, Rows
from kernels.reference import constants
from kernels.reference.numbers import bf16
from tests.kernels import float_guard

COUNT = 200_000
F32 = np.float32
BitsOff = Callable[..., torch.Tensor]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def b() -> ModuleType:
    return kernels.backend("generic:cpu")


@pytest.fixture
def probe_again() -> Iterator[None]:
    """For a test that changes what the product's probe finds."""
    products.method.cache_clear()
    yield
    products.method.cache_clear()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_vector_is_reproduced(b: ModuleType, threads: int) -> None:
    assert conformance.self_test(b) == []


@pytest.mark.slow
def test_blocks_of_any_size_give_the_same_bits(b: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK", 1)
    monkeypatch.setattr(head, "CHUNK", 1)
    monkeypatch.setattr(optimizer, "CHUNK", 100)
    monkeypatch.setattr(products, "SLICE_TERMS", 37)
    monkeypatch.setattr(products, "method", lambda device: "float32")
    assert conformance.self_test(b) == []


def random_bits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32).view(F32)


def near_one(seed: int, count: int) -> np.ndarray:
    """Every mantissa is as likely, at exponents where nothing over- or underflows."""
    return (random_bits(seed, count).view(np.uint32) & np.uint32(0x00FFFFFF) | np.uint32(0x3F000000)).view(F32)


def assert_same(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bits, except that any NaN equals any NaN and a subnormal equals the zero of its sign."""
    values = got.numpy()
    flushed = np.where(np.abs(expected) < F32(2.0**-126), np.copysign(F32(0), expected), expected)
    different = (values.view(np.int32) != flushed.view(np.int32)) & ~(np.isnan(values) & np.isnan(flushed))
    assert not different.any(), (values[different][:5], flushed[different][:5])


EDGES = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2.0**-126, 3.4028235e38, 1.9999999, 0.99999994], F32)


@pytest.mark.parametrize("draw", [random_bits, near_one])
def test_division_is_correctly_rounded(draw: Callable[[int, int], np.ndarray]) -> None:
    a, c = draw(1, COUNT), draw(2, COUNT)
    a, c = np.concatenate([a, np.repeat(EDGES, len(EDGES))]), np.concatenate([c, np.tile(EDGES, len(EDGES))])
    normal = (
        (np.abs(a) >= F32(2.0**-126)) & (np.abs(c) >= F32(2.0**-126)) | (a == 0) | (c == 0) | np.isnan(a) | np.isnan(c)
    )
    a, c = a[normal], c[normal]
    assert_same(exact.divide(torch.from_numpy(a), torch.from_numpy(c)), a / c)


@pytest.mark.parametrize("draw", [random_bits, near_one])
def test_square_root_is_correctly_rounded(draw: Callable[[int, int], np.ndarray]) -> None:
    x = np.concatenate([draw(3, COUNT), EDGES])
    x = x[(np.abs(x) >= F32(2.0**-126)) | (x == 0) | np.isnan(x)]
    assert_same(exact.sqrt(torch.from_numpy(x)), np.sqrt(x))


def test_int64_becomes_float32_with_one_rounding() -> None:
    random = np.random.default_rng(4)
    any_size = random.integers(-(2**63) + 1, 2**63 - 1, COUNT) >> random.integers(0, 63, COUNT)
    shift = random.integers(1, 39, COUNT)
    by_a_tie = (random.integers(2**23, 2**24, COUNT) << shift) + (1 << (shift - 1)) + random.integers(-1, 2, COUNT)
    edges = np.array([0, 1, -1, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**62, -(2**62), 2**63 - 1, -(2**63) + 1])
    for x in (any_size, by_a_tie, -by_a_tie, edges):
        assert_same(exact.f32_of_i64(torch.from_numpy(x)), x.astype(F32))


def test_float32_becomes_int64_exactly() -> None:
    random = np.random.default_rng(5)
    x = np.rint(np.ldexp(random.uniform(-1, 1, COUNT).astype(F32), random.integers(0, 63, COUNT)).astype(F32))
    x = np.concatenate(
        [x, F32([0, 1, -1, 2.0**31, -(2.0**31), 2.0**62 - 2.0**38, -(2.0**62) + 2.0**38, 1.5 * 2.0**31])]
    )
    assert np.array_equal(exact.i64_of_f32(torch.from_numpy(x)).numpy(), x.astype(np.int64))


def test_rows_of_one_index_are_added() -> None:
    random = np.random.default_rng(6)
    for count, kinds in ((1, 1), (100, 1), (257, 5), (300, 1000)):
        index, values = random.integers(0, kinds, count), random.integers(-(2**50), 2**50, (count, 3))
        sums = random.integers(-(2**50), 2**50, (kinds, 3))
        expected = sums.copy()
        np.add.at(expected, index, values)
        numbers.add_rows(torch.from_numpy(sums), torch.from_numpy(index), torch.from_numpy(values))
        assert np.array_equal(sums, expected)


def test_an_infinite_gradient_of_an_unseen_score_counts_for_nothing(b: ModuleType) -> None:
    shape = AttentionShape(heads=2, kv_heads=1, width=16, sequence=40, window=8)
    ones = np.ones((40, 16), np.int8)
    k = Rows(ones, None, np.full(40, 2.0**-8, F32))
    v = Rows(ones, None, np.where(np.arange(40) == 39, F32(2.0**60), F32(1)))  # seen by the last query alone
    q = Rows(np.ones((80, 16), np.int8), None, np.full(80, 2.0**-8, F32))
    d_out = np.where(np.arange(40) < 39, F32(2.0**70), F32(0))[:, None] * np.ones((1, 32), F32)
    results = []
    for backend in (reference, b):
        flag = backend.new_flag()
        rows = [Rows(backend.to_device(x.hi), None, backend.to_device(x.scale)) for x in (q, k, v)]
        saved = backend.attention(*rows, shape)
        gradients = backend.attention_backward(*rows, saved, backend.to_device(bf16(d_out)), shape, flag)
        results.append([backend.to_host(x).tobytes() for x in (*saved, *gradients, flag)])
    assert results[0] == results[1]


def test_constants_are_the_reference_s() -> None:
    for name in ("EXP2", "LOG2", "NORMAL", "LOG2_E", "LN_2", "ROOT_HALF_BITS"):
        assert getattr(elementary, name) == getattr(constants, name), name


def off_by_ulps(function: BitsOff, ulps: int) -> BitsOff:
    """A device whose result is some units in the last place off, up and down by turns."""

    def wrong(*args: Any) -> torch.Tensor:
        right = function(*args)
        turn = (right.view(torch.int32) & 1) * 2 - 1
        ordinary = (right != 0) & torch.isfinite(right)
        return torch.where(ordinary, (right.view(torch.int32) + turn * ulps).view(torch.float32), right)

    return wrong


@pytest.mark.parametrize("ulps", [1, 5])
def test_wrong_square_roots_and_divisions_are_corrected(
    b: ModuleType, monkeypatch: pytest.MonkeyPatch, ulps: int
) -> None:
    monkeypatch.setattr(torch, "sqrt", off_by_ulps(torch.sqrt, ulps))
    monkeypatch.setattr(torch.Tensor, "__truediv__", off_by_ulps(torch.Tensor.__truediv__, ulps))
    two = torch.full((1,), 2.0)
    assert (two / two).item() != 1 and torch.sqrt(two * two).item() != 2
    assert conformance.self_test(b) == []


def test_an_integer_product_that_saturates_is_not_used(
    b: ModuleType, monkeypatch: pytest.MonkeyPatch, probe_again: None
) -> None:
    def saturating(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """As x86 without VNNI: unsigned times signed bytes, whose sums of two stop at ±2¹⁵."""
        shifted, c = a.to(torch.int32) + 128, c.to(torch.int32)
        pairs = [shifted[:, i : i + 2] @ c[i : i + 2] for i in range(0, a.shape[1], 2)]
        total = torch.stack([pair.clamp(-(2**15), 2**15 - 1) for pair in pairs]).sum(0, dtype=torch.int32)
        return total - 128 * c.sum(0, dtype=torch.int32)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert b.describe()["product"] == "float32"
    assert conformance.self_test(b) == []


def test_an_integer_product_that_is_slower_is_not_used(
    b: ModuleType, monkeypatch: pytest.MonkeyPatch, probe_again: None
) -> None:
    def slow(a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return products._float32(a, c)

    monkeypatch.setattr(products, "METHODS", {"slow": slow, **products.METHODS})
    assert products.exact(slow, torch.device("cpu"))
    assert b.describe()["product"] != "slow"


def test_an_integer_product_that_is_missing_is_not_used(
    b: ModuleType, monkeypatch: pytest.MonkeyPatch, probe_again: None
) -> None:
    def missing(*_: Any) -> torch.Tensor:
        raise NotImplementedError("aten::_int_mm is not implemented for this device")

    monkeypatch.setattr(torch, "_int_mm", missing)
    assert b.describe()["product"] == "float32"
    assert conformance.self_test(b) == []


def test_no_exact_product_is_refused(b: ModuleType, monkeypatch: pytest.MonkeyPatch, probe_again: None) -> None:
    monkeypatch.setattr(products, "METHODS", {"float32": lambda a, c: products._float32(a, c).clamp(max=2**23)})
    with pytest.raises(RuntimeError, match="no int8 product is exact on cpu"):
        b.describe()


def blind_to_nan(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.max(torch.where(x > exact.INFINITE, 0, x), dim).values


def half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def no_sort(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("aten::sort is not implemented for this device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong", "operations"),
    [
        ("round", half_away, {"linear", "swiglu", "weights"}),
        ("amax", blind_to_nan, {"linear", "norm", "weights"}),
        ("sort", no_sort, {"embed", "head"}),
    ],
)
def test_what_cannot_be_corrected_is_refused_by_name(
    b: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, wrong: BitsOff, operations: set[str]
) -> None:
    products.integer_product(*torch.ones(2, 1, 1, dtype=torch.int8))  # the probe has run
    monkeypatch.setattr(torch, name, wrong)
    failing = {case.split()[0] for case in conformance.self_test(b)}
    assert operations <= failing


class _NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in (*args, out):
            assert not (isinstance(value, torch.Tensor) and value.dtype == torch.float64), func
        return out


def test_no_float64_and_no_sum_of_floats(b: ModuleType) -> None:
    with float_guard.forbidden(), _NoFloat64():
        for name, case in conformance.cases():
            if "plain" in name:  # the guard is slow; the other kinds run the same operations
                case(b)


@pytest.mark.parametrize("device", ["nowhere", "mps", "hpu", ""])
def test_a_device_that_is_not_here_is_refused(device: str) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(ValueError, match=f"has no device '{device}' on this machine"):
        kernels.backend(f"generic:{device}")


def test_arrays_cross_unchanged(b: ModuleType) -> None:
    for dtype in (np.float32, np.int64, np.int32, np.int8, np.uint16):
        array = np.arange(6).reshape(2, 3).astype(dtype)
        array.setflags(write=False)
        back = b.to_host(b.to_device(array))
        assert back.dtype == array.dtype and np.array_equal(back, array)
    assert b.to_host(b.new_sums((2, 3))).tolist() == [[0] * 3] * 2
