"""A debug mode: any backend, with what rule 4 of the contract promises of its outputs asserted after every call.

`kernels.backend("checked:cpu")` gives the same bytes as "cpu", slower: a subnormal never makes a difference because
every store, quantiser and sum ends in one of these sinks, and RuleBroken names the output that did not.

    bf16    +0, or 2⁻¹⁰⁰ and more, or the one NaN       scale  finite; +0 with codes of 0, or a row's least and more
    codes   within ±127; −128 in low slices alone      r      finite, and no more than 1 ÷ √eps
    sums    f32: +0, or 2⁻¹⁰⁰ and more, and finite      i64    change by no more than one unit may
    AdamW   p, m: +0, or 2⁻⁶⁴ and more; v: 2⁻¹⁰⁰        flag   0 or 1, never lowered, raised by what is not finite

A bf16 store may hold ∞ or NaN: the quantiser or sum that reads it raises the flag. `attention` keeps the rows' maxima
as they are, since only exp2 of a difference to them is ever used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from kernels.interface import (
    GRADIENT_BITS,
    INT8_MAX,
    INT16_MAX,
    LSE2_BITS,
    LSE2_LIMIT,
    SUM_LIMIT,
    AdamScalars,
    Attended,
    AttentionShape,
    GradientSlices,
    Part,
    Rope,
    Rows,
    Weight,
)

F32 = np.float32
ONE, LARGEST, INFINITE = F32(1), np.finfo(F32).max, F32(np.inf)
ROW_FLOOR, STORE_FLOOR, WEIGHT_FLOOR, MOMENT_FLOOR, SQUARE_FLOOR = (F32(2.0**-k) for k in (64, 100, 64, 64, 100))
BF16_FLOOR, BF16_INFINITE, BF16_NAN = 0x0D80, 0x7F80, 0x7FC0  # the bits of 2⁻¹⁰⁰, of ∞, and of the one NaN
LSQ_STEP = F32(float.fromhex("0x1.6b7612p-3"))  # 2 / √127, rounded once
LOG2_E, LN_2 = (np.uint32(bits).view(F32) for bits in (0x3FB8AA3B, 0x3F317218))
LEAST = {1: ROW_FLOOR * (ONE / F32(INT8_MAX)), 2: ROW_FLOOR * (ONE / F32(INT16_MAX))}  # scales, by slices


class RuleBroken(AssertionError):
    """An output that is not what the contract promises: which one, where, its value and bits, and the promise."""


class _Call:
    """One call of a backend's function, and the promises that its outputs must keep."""

    def __init__(self, backend: ModuleType, name: str) -> None:
        self.backend, self.name = backend, name

    def holds(self, output: str, x: np.ndarray, good: np.ndarray, promise: str) -> None:
        """RuleBroken with the first element of x where `good` is false."""
        if np.all(good):
            return
        place = tuple(int(i) for i in np.argwhere(~good)[0])
        bits = x[place].tobytes()[::-1].hex()
        raise RuleBroken(
            f"{self.name} of backend {self.backend.NAME}: {output}{list(place)} is {x[place]} (bits {bits}), "
            f"promised is {promise}; `verbatim doctor` says whether its vectors hold on this machine"
        )

    def bf16(self, output: str, x: Any) -> None:
        bits = self.backend.to_host(x)
        size = bits & np.uint16(0x7FFF)
        good = (bits == 0) | (bits == BF16_NAN) | ((size >= BF16_FLOOR) & (size <= BF16_INFINITE))
        self.holds(output, bits, good, "+0, a magnitude of 2⁻¹⁰⁰ or more, or NaN 7fc0")

    def floats(self, output: str, x: Any, least: np.float32, most: np.float32 = LARGEST) -> None:
        """+0, or a magnitude from `least` to `most`."""
        array = self.backend.to_host(x)
        good = (array.view(np.int32) == 0) | ((np.abs(array) >= least) & (np.abs(array) <= most))
        self.holds(output, array, good, f"+0, or a magnitude from {least} to {most}")

    def integers(self, output: str, x: Any, least: int, most: int) -> None:
        array = np.asarray(x)
        self.holds(output, array, (array >= least) & (array <= most), f"from {least} to {most}")

    def codes(self, hi: Any, lo: Any, scale: Any, least: np.float32) -> None:
        """A quantiser's output, whose scales are 0 or at least `least`."""
        self.floats("scale", scale, least)
        self.holds("scale", host := self.backend.to_host(scale), host >= 0, "not negative")
        high = self.backend.to_host(hi)
        self.integers("hi", high, -INT8_MAX, INT8_MAX)
        code = high.astype(np.int32)
        if lo is not None:
            code = code * 256 + self.backend.to_host(lo)
            self.integers("hi·256 + lo", code, -INT16_MAX, INT16_MAX)
        self.holds("code", code, (code == 0) | (host > 0)[:, None], "0 where the scale is 0")

    def rows(self, rows: Rows, slices: int, factor: np.float32 = ONE) -> None:
        if (rows.lo is None) != (slices == 1):
            raise RuleBroken(f"{self.name} of backend {self.backend.NAME}: lo does not go with {slices} slices")
        self.codes(*rows, LEAST[slices] * factor)

    def inverse_rms(self, r: Any, eps: np.float32) -> None:
        array = self.backend.to_host(r)
        most = ONE / np.sqrt(F32(eps))
        self.holds("r", array, (array >= F32(2.0**-64)) & (array <= most), f"from 2⁻⁶⁴ to {most}")

    def not_finite(self, x: Any) -> bool:
        """Whether an argument, f32 or bf16, has a value that is not finite."""
        array = self.backend.to_host(x)
        if array.dtype == np.uint16:
            return bool(np.any((array & np.uint16(0x7FFF)) >= BF16_INFINITE))
        return not np.all(np.isfinite(array))


class Checked(ModuleType):
    """A backend's functions, each followed by its promises."""

    def __init__(self, backend: ModuleType) -> None:
        super().__init__(f"kernels.checked.{backend.NAME}", __doc__)
        self.backend, self.NAME = backend, f"checked:{backend.NAME}"
        self.to_device, self.to_host = backend.to_device, backend.to_host
        self.new_flag, self.new_sums, self.leaves_of = backend.new_flag, backend.new_sums, backend.leaves_of
        self.device_memory, self.weight_of = backend.device_memory, backend.weight_of

    def describe(self) -> dict[str, Any]:
        return {**self.backend.describe(), "backend": self.NAME}

    @contextmanager
    def _call(
        self, name: str, flag: Any, *raised_by: Any, sums: tuple[Any, ...] = (), terms: int = 1
    ) -> Iterator[_Call]:
        """Around a call: its flag is raised if an argument of `raised_by` is not finite, its sums keep their bound."""
        call, host = _Call(self.backend, name), self.backend.to_host
        before, sums_before = int(host(flag)[0]), [host(s).copy() for s in sums]
        must = before or int(any(call.not_finite(x) for x in raised_by))
        yield call
        call.integers("flag", host(flag), must, 1)
        most = 2 ** (SUM_LIMIT + GRADIENT_BITS) + terms
        for s, old in zip(sums, sums_before, strict=True):
            call.integers("change of sums", host(s) - old, -most, most)

    def initial_weights(self, seed: int, name: str, shape: tuple[int, ...], std: np.float32) -> Any:
        out = self.backend.initial_weights(seed, name, shape, std)
        _Call(self.backend, "initial_weights").floats("weights", out, WEIGHT_FLOOR)
        return out

    def embed(self, table: Any, tokens: Any) -> Any:
        out = self.backend.embed(table, tokens)
        _Call(self.backend, "embed").bf16("rows", out)
        return out

    def embed_backward(self, dx: Any, tokens: Any, sums: Any, flag: Any) -> None:
        with self._call("embed_backward", flag, dx, sums=(sums,), terms=len(tokens)):
            self.backend.embed_backward(dx, tokens, sums, flag)

    def norm_bf16(self, x: Any, gain: Any, eps: np.float32, flag: Any) -> tuple[Any, Any]:
        with self._call("norm_bf16", flag, x) as call:
            out, r = self.backend.norm_bf16(x, gain, eps, flag)
        call.bf16("y", out)
        call.inverse_rms(r, eps)
        return out, r

    def norm_rows(self, x: Any, gain: Any, eps: np.float32, slices: int, flag: Any) -> tuple[Rows, Any]:
        with self._call("norm_rows", flag, x, gain) as call:
            rows, r = self.backend.norm_rows(x, gain, eps, slices, flag)
        call.rows(rows, slices)
        call.inverse_rms(r, eps)
        return rows, r

    def norm_backward(self, dy: Any, x: Any, r: Any, gain: Any, residual: Any, sums: Any, flag: Any) -> Any:
        with self._call("norm_backward", flag, dy, x, sums=(sums,), terms=len(dy)) as call:
            out = self.backend.norm_backward(dy, x, r, gain, residual, sums, flag)
        call.bf16("dx", out)
        return out

    def quantise_rows(self, x: Any, slices: int, flag: Any) -> Rows:
        with self._call("quantise_rows", flag, x) as call:
            rows: Rows = self.backend.quantise_rows(x, slices, flag)
        call.rows(rows, slices)
        return rows

    def quantise_weight(self, w: Any, rule: str, flag: Any) -> Weight:
        with self._call("quantise_weight", flag, w) as call:
            weight: Weight = self.backend.quantise_weight(w, rule, flag)
        lsq = (ROW_FLOOR * (ONE / F32(w.shape[1]))) * LSQ_STEP
        call.codes(weight.hi, None, weight.scale, lsq if rule == "lsq" else LEAST[1])
        return weight

    def project(self, x: Rows, w: Weight) -> Any:
        out = self.backend.project(x, w)
        _Call(self.backend, "project").bf16("y", out)
        return out

    def project_add(self, x: Rows, w: Weight, residual: Any) -> Any:
        out = self.backend.project_add(x, w, residual)
        _Call(self.backend, "project_add").bf16("y", out)
        return out

    def linear_backward(self, x: Rows, parts: tuple[Part, ...], slices: GradientSlices, flag: Any) -> Any:
        given, sums = (part.dy for part in parts), tuple(part.sums for part in parts)
        with self._call("linear_backward", flag, *given, sums=sums) as call:
            out = self.backend.linear_backward(x, parts, slices, flag)
        call.bf16("dx", out)
        return out

    def rotate_rows(self, y: Any, rope: Rope, eps: np.float32, query: bool, flag: Any) -> Rows:
        with self._call("rotate_rows", flag, y) as call:
            rows: Rows = self.backend.rotate_rows(y, rope, eps, query, flag)
        width = 2 * rope.cos.shape[1]
        call.rows(rows, 1, LOG2_E * (ONE / np.sqrt(F32(width))) if query else ONE)
        return rows

    def rotate_backward(self, dz: Any, y: Any, rope: Rope, eps: np.float32, flag: Any) -> Any:
        with self._call("rotate_backward", flag, dz, y) as call:
            out = self.backend.rotate_backward(dz, y, rope, eps, flag)
        call.bf16("dy", out)
        return out

    def attention(self, q: Rows, k: Rows, v: Rows, shape: AttentionShape) -> Attended:
        attended: Attended = self.backend.attention(q, k, v, shape)
        call, host = _Call(self.backend, "attention"), self.backend.to_host
        call.bf16("out", attended.out)
        peak = host(attended.peak)
        call.holds("peak", peak, np.isfinite(peak), "finite")
        call.integers("total", host(attended.total), 2**18, min(shape.window, shape.sequence) * 2**18)
        return attended

    def attention_backward(
        self, q: Rows, k: Rows, v: Rows, saved: Attended, d_out: Any, shape: AttentionShape, flag: Any
    ) -> tuple[Any, Any, Any]:
        with self._call("attention_backward", flag, d_out) as call:
            dq, dk, dv = self.backend.attention_backward(q, k, v, saved, d_out, shape, flag)
        # Whole numbers times a scale, perhaps infinite: rotate_backward, which alone reads them, raises the flag then.
        call.floats("dq", dq, LEAST[2] * (ONE / np.sqrt(F32(shape.width))), INFINITE)
        call.floats("dk", dk, LEAST[2] * LN_2, INFINITE)
        call.bf16("dv", dv)
        return dq, dk, dv

    def swiglu_rows(self, gate_up: Any, slices: int, flag: Any) -> Rows:
        with self._call("swiglu_rows", flag, gate_up) as call:
            rows: Rows = self.backend.swiglu_rows(gate_up, slices, flag)
        call.rows(rows, slices)
        return rows

    def swiglu_backward(self, dh: Any, gate_up: Any) -> Any:
        out = self.backend.swiglu_backward(dh, gate_up)
        _Call(self.backend, "swiglu_backward").bf16("d_gate_up", out)
        return out

    def head(self, x: Rows, w: Weight, targets: Any, flag: Any) -> tuple[Any, Any]:
        with self._call("head", flag, x.scale, w.scale) as call:
            nll, lse2 = self.backend.head(x, w, targets, flag)
        _losses(call, nll, lse2, len(targets))
        return nll, lse2

    def head_backward(
        self, x: Rows, w: Weight, targets: Any, two_z: np.float32, sums: Any, flag: Any
    ) -> tuple[Any, Any, Any]:
        with self._call("head_backward", flag, x.scale, w.scale, sums=(sums,), terms=len(targets)) as call:
            nll, lse2, dx = self.backend.head_backward(x, w, targets, two_z, sums, flag)
        _losses(call, nll, lse2, len(targets))
        call.bf16("dx", dx)
        return nll, lse2, dx

    def square_rows(self, sums: Any, mean: np.float32) -> Any:
        out = self.backend.square_rows(sums, mean)
        _Call(self.backend, "square_rows").floats("sums", out, STORE_FLOOR)
        return out

    def fixed_sum(self, x: Any, flag: Any) -> Any:
        with self._call("fixed_sum", flag, x) as call:
            out = self.backend.fixed_sum(x, flag)
        call.floats("sums", out, STORE_FLOOR)
        return out

    def adamw(self, p: Any, m: Any, v: Any, sums: Any, scalars: AdamScalars) -> None:
        self.backend.adamw(p, m, v, sums, scalars)
        call = _Call(self.backend, "adamw")
        for name, x, least in (("p", p, WEIGHT_FLOOR), ("m", m, MOMENT_FLOOR), ("v", v, SQUARE_FLOOR)):
            call.floats(name, x, least)


def _losses(call: _Call, nll: Any, lse2: Any, terms: int) -> None:
    most = 2 ** (SUM_LIMIT + GRADIENT_BITS) + terms
    call.integers("nll", int(nll), -most, most)
    call.integers("lse2", int(lse2), 0, 2 ** (LSE2_LIMIT + LSE2_BITS) + terms)
