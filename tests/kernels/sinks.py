"""Rule 4 inside the reference: every subnormal ends in a sink, and no sink's output depends on it.

Within `asserted()` each sink of kernels/reference (stores, quantisers, fixed-point sums, floors, exponentials) is
called again with its input's subnormals flushed to a zero of their sign, with the signs of its zeros turned, and with
everything below 2⁻¹⁰¹ replaced by zero: the last stands for whatever a flush may leave in later sums. All outputs and
the flag must be the same bytes. Multipliers are at most 2¹⁰⁰, scales and sums are never subnormal. Nothing of it stands
in the reference: its modules' names are replaced from outside.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kernels import reference
from kernels.checked import RuleBroken
from kernels.reference import elementary, numbers, optimizer, quantise

F32 = np.float32
TINY = F32(2.0**-126)
NOTHING = F32(2.0**-101)  # half of the smallest unit that any sink counts in
LARGEST_MULTIPLIER = 2.0**100
POWER_OF_TWO = numbers.power_of_two
Arrays = Callable[[np.ndarray], np.ndarray]

# A sink and the place of its flag among its arguments; its first argument is what may hold subnormals.
SINKS: dict[Any, int | None] = {
    numbers.bf16: None,
    numbers.fixed_sum: 1,
    numbers.fixed_point: 2,
    optimizer.floor: None,
    quantise.scale_and_inverse: None,
    quantise.split: None,
    quantise.quantise_weight: 2,
    elementary.exp2: None,
    elementary.sigmoid: None,
}


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormals as zeros of their sign: what a processor that flushes would have made of them."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), x), x)


def turned(x: np.ndarray) -> np.ndarray:
    """Zeros, and what flushes to one, with the other sign."""
    return np.where(np.abs(x) < TINY, np.copysign(F32(0), -x), x)


def emptied(x: np.ndarray) -> np.ndarray:
    """Everything below half of the smallest unit as +0."""
    return np.where(np.abs(x) < NOTHING, F32(0), x)


@contextmanager
def asserted() -> Iterator[Counter[str]]:
    """RuleBroken where a sink of the reference lets a subnormal through; counts the subnormals that each sink met."""
    met: Counter[str] = Counter()
    replaced = {sink: _asserting(sink, flag, met) for sink, flag in SINKS.items()}
    replaced[POWER_OF_TWO] = _bounded_power
    with pytest.MonkeyPatch.context() as patch:
        for module in [reference, *_modules()]:
            for name, value in list(vars(module).items()):
                if callable(value) and value in replaced:
                    patch.setattr(module, name, replaced[value])
        yield met


def _modules() -> list[Any]:
    return [importlib.import_module(f"kernels.reference.{m.name}") for m in pkgutil.iter_modules(reference.__path__)]


def _asserting(sink: Any, flag: int | None, met: Counter[str]) -> Any:
    name = sink.__name__

    def asserting(x: np.ndarray, *rest: Any) -> Any:
        met[name] += int(np.count_nonzero((np.abs(x) < TINY) & (x != 0)))
        before = None if flag is None else rest[flag - 1].copy()
        out = sink(x, *rest)
        for change in (flushed, turned, emptied):
            others, raised = list(rest), b""
            if flag is not None:
                others[flag - 1] = before.copy()
                raised = rest[flag - 1].tobytes()
            again = sink(change(x), *others)
            if _bytes(again) != _bytes(out) or (flag is not None and others[flag - 1].tobytes() != raised):
                raise RuleBroken(f"{name}: {change.__name__} values change what it returns")
        _bounds(name, rest, out)
        return out

    return asserting


def _bytes(out: Any) -> list[bytes]:
    parts = out if isinstance(out, tuple) else (out,)
    return [b"" if part is None else part.tobytes() for part in parts]


def _bounds(name: str, rest: tuple[Any, ...], out: Any) -> None:
    """Multipliers of sinks are at most 2¹⁰⁰, and what a sum or a scale returns is no subnormal."""
    if name == "split" and np.any(rest[0] > LARGEST_MULTIPLIER):
        raise RuleBroken(f"split: a multiplier of {rest[0].max()}, promised is at most 2¹⁰⁰")
    if name == "fixed_point" and 2.0 ** rest[0] > LARGEST_MULTIPLIER:
        raise RuleBroken(f"fixed_point: a multiplier of 2^{rest[0]}, promised is at most 2¹⁰⁰")
    if name == "fixed_sum":
        _no_less(name, out, 2.0**-100)
    if name == "scale_and_inverse":
        _no_less(name, out[0], 2.0**-64 / 32513)
        _no_less(name, out[1], 2.0**-126)


def _no_less(name: str, x: np.ndarray, least: float) -> None:
    small = (x != 0) & (np.abs(x) < F32(least))
    if np.any(small):
        raise RuleBroken(f"{name}: returns {x[small][0]}, promised is 0 or {least} and more")


def _bounded_power(k: np.ndarray) -> np.ndarray:
    if np.any(k > 100) or np.any(k < -126):
        raise RuleBroken(f"power_of_two: exponents {k.min()} to {k.max()}, promised are −126 to 100")
    return POWER_OF_TWO(k)
