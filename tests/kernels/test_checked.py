"""The checked backends: right ones pass every vector, and each broken promise is named with its value."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kernels
from kernels import checked, conformance, reference
from kernels.interface import AdamScalars, AttentionShape, Rows, Weight
from kernels.reference import elementary, numbers, optimizer, quantise
from kernels.reference.numbers import bf16
from tests.kernels import sinks

F32 = np.float32
SHAPE = AttentionShape(heads=1, kv_heads=1, width=2, sequence=4, window=4)
SCALARS = AdamScalars(*map(F32, (2.0**-30, 1, 1e-3, 1, 0.9, 0.1, 0.95, 0.05, 10, 20, 1e-8)))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*kernels.HOSTS, "generic:cpu"])
def test_every_vector_keeps_its_promises(name: str) -> None:
    assert conformance.self_test(kernels.backend(f"checked:{name}")) == []


def test_every_function_of_a_backend_is_checked() -> None:
    own = set(vars(checked.Checked)) | set(vars(kernels.backend("checked:reference")))
    assert set(reference.__all__) <= own
    assert kernels.backend("checked:generic:cpu").describe()["backend"] == "checked:generic:cpu"
    with pytest.raises(ValueError, match="no backend is called 'nothing'"):
        kernels.backend("checked:nothing")
    with pytest.raises(ValueError, match="checked: stands once"):
        kernels.backend("checked:checked:reference")


def altered(**functions: Callable[..., Any]) -> ModuleType:
    """The reference with some functions replaced, checked."""
    module = ModuleType("altered")
    vars(module).update({**vars(reference), **functions})
    return checked.Checked(module)


def values(*rows: list[float]) -> np.ndarray:
    return np.array(rows, F32)


def rows(hi: int, lo: int | None, scale: float) -> Rows:
    codes = [None if code is None else np.full((4, 2), code, np.int8) for code in (hi, lo)]
    return Rows(*codes, np.full(4, scale, F32))


ONES = bf16(np.ones((4, 2), F32))
GAIN = np.ones(2, F32)
EPS = F32(1e-5)
FLAWS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...]]] = {
    r"rows\[0, 0\] is 128 \(bits 0080\)": ("embed", lambda *_: np.full((1, 1), 0x0080, np.uint16), (0, 0)),
    r"rows\[0, 0\] is 32768 \(bits 8000\)": ("embed", lambda *_: np.full((1, 1), 0x8000, np.uint16), (0, 0)),
    r"rows\[0, 0\] is 65473 \(bits ffc1\)": ("embed", lambda *_: np.full((1, 1), 0xFFC1, np.uint16), (0, 0)),
    r"y\[0, 0\] is 3455": ("project", lambda *_: np.full((1, 1), 0x0D7F, np.uint16), (0, 0)),
    r"scale\[0\] is 3.3": ("quantise_rows", lambda *_: rows(127, None, 2.0**-78), (ONES, 1)),
    r"scale\[0\] is inf": ("quantise_rows", lambda *_: rows(127, None, np.inf), (ONES, 1)),
    r"scale\[0\] is -1": ("quantise_rows", lambda *_: rows(127, None, -1), (ONES, 1)),
    r"scale\[0\] is 8.2": ("swiglu_rows", lambda *_: rows(127, 0, 2.0**-80), (ONES, 2)),
    r"code\[0, 0\] is 1 ": ("quantise_rows", lambda *_: rows(1, None, 0), (ONES, 1)),
    r"hi\[0, 0\] is -128": ("quantise_rows", lambda *_: rows(-128, None, 1), (ONES, 1)),
    r"hi·256 \+ lo\[0, 0\] is 32513": ("quantise_rows", lambda *_: rows(127, 1, 1), (ONES, 2)),
    r"lo does not go with 1 slices": ("quantise_rows", lambda *_: rows(127, 0, 1), (ONES, 1)),
    r"quantise_weight .* scale": (
        "quantise_weight",
        lambda *_: Weight(np.ones((4, 2), np.int8), np.full(4, 2.0**-68, F32)),
        (np.ones((4, 2), F32), "lsq"),
    ),
    r"r\[0\] is inf": ("norm_rows", lambda *_: (rows(1, None, 1), values([np.inf])[0]), (ONES, GAIN, EPS, 1)),
    r"r\[0\] is 0": ("norm_bf16", lambda *_: (ONES, np.zeros(4, F32)), (ONES, GAIN, EPS)),
    r"sums\[0\] is inf": ("fixed_sum", lambda *_: values([np.inf])[0], (values([1]),)),
    r"sums\[0\] is 3.9": ("fixed_sum", lambda *_: values([2.0**-101])[0], (values([1]),)),
}


@pytest.mark.parametrize("message", FLAWS)
def test_an_output_past_its_bound_is_named(message: str) -> None:
    name, function, given = FLAWS[message]
    backend = altered(**{name: function})
    flag = () if name in ("embed", "project") else (backend.new_flag(),)
    with pytest.raises(checked.RuleBroken, match=message) as caught:
        getattr(backend, name)(*given, *flag)
    assert str(caught.value).startswith(f"{name} of backend reference: ")


def test_attention_s_own_numbers_are_bounded() -> None:
    right = rows(127, None, 1)
    saved = reference.attention(right, right, right, SHAPE)
    for flaw in (
        saved._replace(peak=np.full_like(saved.peak, np.nan)),
        saved._replace(total=saved.total - 1),
        saved._replace(total=np.full_like(saved.total, 2**20 + 1)),
        saved._replace(out=np.ones_like(saved.out)),
    ):
        with pytest.raises(checked.RuleBroken):
            altered(attention=lambda *_, flaw=flaw: flaw).attention(right, right, right, SHAPE)
    for place, least in ((0, 2.0**-84), (1, 2.0**-84)):
        out = [np.ones((4, 2), F32), np.ones((4, 2), F32), ONES]
        out[place] = np.full((4, 2), least / 64, F32)
        backend = altered(attention_backward=lambda *_, out=out: tuple(out))
        with pytest.raises(checked.RuleBroken, match=("dq", "dk")[place]):
            backend.attention_backward(right, right, right, saved, ONES, SHAPE, backend.new_flag())


def test_sums_and_losses_keep_their_limits() -> None:
    def too_much(dx: np.ndarray, tokens: np.ndarray, sums: np.ndarray, flag: np.ndarray) -> None:
        sums[0, 0] += 2**51 + len(tokens) + 1

    tokens = np.zeros(4, np.int64)
    backend = altered(embed_backward=too_much, head=lambda *_: (2**51 + 5, 0))
    with pytest.raises(checked.RuleBroken, match=r"change of sums\[0, 0\] is 2251799813685253"):
        backend.embed_backward(ONES, tokens, np.full((1, 2), 2**62), backend.new_flag())
    with pytest.raises(checked.RuleBroken, match="head of backend reference: nll"):
        backend.head(rows(1, 0, 1), Weight(np.ones((2, 2), np.int8), np.ones(2, F32)), tokens, backend.new_flag())


def test_the_flag_is_raised_and_stays() -> None:
    def without_flag(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
        return reference.quantise_rows(x, slices, np.zeros(1, np.int32))

    def lowering(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
        flag[0] = 0
        return reference.quantise_rows(x, slices, flag)

    def counting(x: np.ndarray, slices: int, flag: np.ndarray) -> Rows:
        flag[0] += 2
        return reference.quantise_rows(x, slices, flag)

    for function, x, flag in (
        (without_flag, bf16(values([1, np.nan])), 0),
        (without_flag, bf16(values([1, -np.inf])), 0),
        (lowering, ONES, 1),
        (counting, ONES, 0),
    ):
        with pytest.raises(checked.RuleBroken, match="quantise_rows of backend reference: flag"):
            altered(quantise_rows=function).quantise_rows(x, 1, np.full(1, flag, np.int32))


@pytest.mark.parametrize(("floor", "output"), [("MOMENT", "m"), ("SQUARE", "v"), ("WEIGHT", "p")])
@pytest.mark.parametrize("name", ["reference", "generic:cpu"])
def test_an_update_without_a_floor_is_named(
    name: str, floor: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.generic import optimizer as generic

    monkeypatch.setattr(generic if name != "reference" else optimizer, f"{floor}_FLOOR", 0)
    backend = kernels.backend(f"checked:{name}")
    p, m, v = (values([1, 2.0**-k]) for k in (64.5, 64, 100))
    with pytest.raises(checked.RuleBroken, match=rf"adamw of backend {name}: {output}\[0, 1\]"):
        backend.adamw(*map(backend.to_device, (p, m, v)), backend.new_sums((1, 2)), SCALARS)


@pytest.mark.parametrize("name", ["reference", "generic:cpu"])
def test_a_backend_without_floors_of_stores_and_rows_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.generic import numbers as generic_numbers
    from kernels.generic import quantise as generic_quantise

    own = name == "reference"  # whose floors are floats; the other's are their bits
    monkeypatch.setattr(numbers if own else generic_numbers, "STORE_FLOOR", 0)
    monkeypatch.setattr(quantise if own else generic_quantise, "ROW_FLOOR", F32(2.0**-120) if own else 1)
    backend = kernels.backend(f"checked:{name}")
    with pytest.raises(checked.RuleBroken, match="embed of backend"):
        backend.embed(backend.to_device(values([2.0**-110])), backend.to_device(np.zeros(1, np.int64)))
    with pytest.raises(checked.RuleBroken, match=r"quantise_rows of backend .*: scale"):
        backend.quantise_rows(backend.to_device(bf16(values([2.0**-65]))), 1, backend.new_flag())


@pytest.mark.slow
def test_the_reference_s_vectors_depend_on_no_subnormal() -> None:
    with sinks.asserted() as met:
        for name, case in conformance.cases():
            if "4096" not in name:  # its rows hold nothing that the short ones lack
                case(reference)
        elementary.sigmoid(values([2.0**-130, -(2.0**-130)]))  # bf16 and scores bring none there
        optimizer.floor(values([2.0**-130]), F32(2.0**-100))
    assert set(met) == {sink.__name__ for sink in sinks.SINKS} and all(met.values()), met


SINK_FLAWS: dict[str, tuple[Any, str, Any, Callable[[], Any]]] = {
    "bf16: flushed": (numbers, "STORE_FLOOR", F32(0), lambda: reference.embed(values([2.0**-130]), np.zeros(1, int))),
    "scale_and_inverse: flushed": (
        quantise,
        "ROW_FLOOR",
        F32(0),
        lambda: reference.quantise_rows(ONES * np.uint16(0) + np.uint16(1), 1, reference.new_flag()),
    ),
    "floor: flushed": (
        optimizer,
        "WEIGHT_FLOOR",
        F32(0),
        lambda: reference.adamw(values([2.0**-130]), GAIN * 0, GAIN * 0, np.zeros(1, np.int64), SCALARS),
    ),
    "split: a multiplier": (
        quantise,
        "scale_and_inverse",
        lambda top, _: (top, np.full_like(top, 2.0**101)),
        lambda: reference.quantise_rows(ONES, 1, reference.new_flag()),
    ),
    r"power_of_two: exponents 101": (
        numbers,
        "fixed_sum",
        lambda x, _: numbers.power_of_two(np.full(len(x), 101)),
        lambda: numbers.fixed_sum(values([1]), reference.new_flag()),
    ),
    r"fixed_point: a multiplier of 2\^101": (
        reference.layers,
        "GRADIENT_BITS",
        101,
        lambda: reference.embed_backward(ONES, np.zeros(4, np.int64), np.zeros((1, 2), np.int64), reference.new_flag()),
    ),
    "exp2: flushed": (
        elementary,
        "EXP2",
        (F32(1), F32(np.inf)),
        lambda: elementary.exp2(values([2.0**-130])),
    ),
}


@pytest.mark.parametrize("message", SINK_FLAWS)
def test_a_sink_of_the_reference_that_leaks_is_named(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, flaw, call = SINK_FLAWS[message]
    monkeypatch.setattr(module, name, flaw)
    with sinks.asserted(), pytest.raises(checked.RuleBroken, match=message):
        call()
