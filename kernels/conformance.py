"""Conformance vectors: inputs from Philox, digests of outputs, committed beside the code.

The reference wrote them (`python -m kernels.conformance` writes them anew after a change of contract); every backend
must reproduce them, also on an auditor's own machine before the first audit. Cases cover each operation at length 128,
at odd sizes, with one and two slices, over scales from 2⁻¹²⁰ to 2⁶⁰, and with values that are not finite; attention
also at its full length, sums also at their limits; digests of leaves of many shapes.
"""

import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from kernels import canonical, digest
from kernels.interface import INT16_MAX, AdamScalars, AttentionShape, GradientSlices, Part, Rope, Rows, Weight
from kernels.reference.elementary import normal_cut
from kernels.reference.numbers import bf16
from kernels.reference.philox import words

FILE = Path(__file__).with_name("vectors.json")
F32 = np.float32
SIZES = ((128, 96, 80), (1, 1, 1), (65, 33, 129), (2, 200, 7))  # tokens, input width, output width
SHAPES = (
    AttentionShape(heads=3, kv_heads=1, width=16, sequence=128, window=32),
    AttentionShape(heads=4, kv_heads=2, width=64, sequence=65, window=65),
    AttentionShape(heads=2, kv_heads=2, width=128, sequence=33, window=1),
)
FULL_LENGTH = tuple(  # some faults show only there
    AttentionShape(heads=1, kv_heads=1, width=16, sequence=4096, window=window) for window in (512, 4096)
)
Case = tuple[str, Callable[[ModuleType], list[Any]]]
Report = Callable[[int, int], None]  # vectors done so far, of how many


def vectors() -> dict[str, str]:
    """The committed digests by case name."""
    found = json.loads(FILE.read_text())
    return {str(name): str(value) for name, value in found.items()}


def vectors_digest() -> str:
    """One digest over all committed vectors; a run's header names it."""
    return digest.digest(canonical.dumps(vectors()), "vectors")


def run(backend: ModuleType, first: int = 0, every: int = 1) -> Iterator[tuple[str, str]]:
    """(case, digest of its outputs) for every case, or of every so many from one on, computed by `backend`."""
    for name, case in islice(cases(), first, None, every):
        try:
            with np.errstate(all="ignore"):  # some inputs are not finite on purpose
                outcome = _digest(case(backend))
        except (NotImplementedError, RuntimeError) as error:  # a device that lacks what an operation needs
            outcome = f"{type(error).__name__}: {error}"
        yield name, outcome


def self_test(backend: ModuleType, report: Report = lambda done, of: None) -> list[str]:
    """The vectors, by operation, that `backend` does not reproduce on this machine; none means it may audit."""
    expected, failing = vectors(), []
    for number, (name, value) in enumerate(run(backend), start=1):
        if expected.get(name) != value:
            failing.append(name)
        report(number, len(expected))
    return failing


def cases() -> Iterator[Case]:
    """Every case, by a name that says operation, sizes and kind of input."""
    for size in SIZES:
        for kind in ("plain", "wild", "nonfinite"):
            yield from _row_cases(size, kind)
    for shape in SHAPES:
        for kind in ("plain", "wild", "nonfinite"):
            yield f"attention {'.'.join(map(str, shape))} {kind}", _attention_case(shape, kind)
    for shape in FULL_LENGTH:
        yield f"attention {'.'.join(map(str, shape))} plain", _attention_case(shape, "plain", windows=1)
    yield "sums within float32", _beyond_case(False)
    yield "sums beyond float32", _beyond_case(True)
    for part, reach, two_z in (("neither", 0.9, 0.0), ("target", 1.8, 0.0), ("softmax", 0.9, 1.0)):
        yield f"head limit {part}", _head_limit_case(F32(reach), F32(two_z))
    yield "optimizer largest sums", _largest_sums_case
    for extent, dtype in (((1,), "f4"), ((5000,), "f4"), ((70, 300), "f4"), ((9, 9000), "i8"), ((256, 64), "i8")):
        yield f"leaves {'.'.join(map(str, extent))} {dtype}", _leaves_case(extent, dtype)
    yield "initial weights", lambda b: [b.to_host(b.initial_weights(2**40 + 3, "case", (37, 5), F32(0.02)))]


def _row_cases(size: tuple[int, int, int], kind: str) -> Iterator[Case]:
    label = f"{'.'.join(map(str, size))} {kind}"
    for slices in (1, 2):
        yield f"norm {label} {slices}", _norm_case(size, kind, slices)
        yield f"linear {label} {slices}", _linear_case(size, kind, slices, GradientSlices(slices, slices))
        yield f"swiglu {label} {slices}", _swiglu_case(size, kind, slices)
    if size == SIZES[2]:
        for each in (GradientSlices(1, 2), GradientSlices(2, 1)):
            yield f"linear {label} {each.input} and {each.weight}", _linear_case(size, kind, 1, each)
    yield f"weights {label}", _weight_case(size, kind)
    yield f"rotate {label}", _rotate_case(size, kind)
    yield f"embed {label}", _embed_case(size, kind)
    yield f"head {label}", _head_case(size, kind)
    yield f"optimizer {label}", _optimizer_case(size, kind)


def _norm_case(size: tuple[int, int, int], kind: str, slices: int) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, width, _ = size
        shape = (tokens, width)
        x, dy, residual = (b.to_device(bf16(_floats(f"norm {p}", shape, kind))) for p in ("x", "dy", "residual"))
        gain, flag, sums = b.to_device(_floats("norm gain", (width,), "plain")), b.new_flag(), b.new_sums((width,))
        rows, r = b.norm_rows(x, gain, F32(1e-5), slices, flag)
        y, _ = b.norm_bf16(x, gain, F32(1e-5), flag)
        dx = b.norm_backward(dy, x, r, gain, residual, sums, flag)
        dx_alone = b.norm_backward(dy, x, r, gain, None, sums, flag)
        return _on_host(b, [rows, r, y, dx, dx_alone, sums, flag])

    return case


def _linear_case(
    size: tuple[int, int, int], kind: str, slices: int, of_gradients: GradientSlices
) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, width, out = size
        flag = b.new_flag()
        spread = "wild" if kind == "wild" else "plain"
        x = b.quantise_rows(b.to_device(bf16(_floats("linear x", (tokens, width), spread))), slices, flag)
        residual = b.to_device(bf16(_floats("linear r", (tokens, out), "plain")))
        results: list[Any] = [x]
        parts = []
        for index in range(3):
            values = b.to_device(_floats(f"linear w {index}", (out, width), "plain"))
            w = b.quantise_weight(values, ("max", "lsq")[index % 2], flag)
            dy = b.to_device(bf16(_floats(f"linear dy {index}", (tokens, out), kind)))
            parts.append(Part(dy, w, b.to_device(np.full((out, width), index, np.int64))))
            results += [b.project(x, w), b.project_add(x, w, residual)]
        dx = b.linear_backward(x, tuple(parts), of_gradients, flag)
        return _on_host(b, [*results, dx, *(part.sums for part in parts), flag])

    return case


def _swiglu_case(size: tuple[int, int, int], kind: str, slices: int) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, width, _ = size
        flag, gate_up = b.new_flag(), b.to_device(bf16(_floats("swiglu x", (tokens, 2 * width), kind) * F32(4)))
        dh = b.to_device(bf16(_floats("swiglu dh", (tokens, width), "plain")))
        other = b.to_device(bf16(_floats("s", (tokens, 2 * width), "plain")))
        return _on_host(b, [b.swiglu_rows(gate_up, slices, flag), b.swiglu_backward(dh, other), flag])

    return case


def _weight_case(size: tuple[int, int, int], kind: str) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        flag, w = b.new_flag(), b.to_device(_floats("weight", (size[2], size[1]), kind))
        sums = b.fixed_sum(w, flag)
        return _on_host(b, [b.quantise_weight(w, "max", flag), b.quantise_weight(w, "lsq", flag), sums, flag])

    return case


def _rotate_case(size: tuple[int, int, int], kind: str) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, heads, width = size[0], 3, 16
        angle = _floats("rotate angle", (tokens, width // 2), "plain")
        rope = Rope(b.to_device(angle), b.to_device(F32(1) - angle * angle))
        y = b.to_device(bf16(_floats("rotate y", (tokens, heads * width), kind)))
        dz = b.to_device(_floats("rotate dz", (tokens * heads, width), kind))
        flag = b.new_flag()
        forward = [b.rotate_rows(y, rope, F32(1e-5), query, flag) for query in (True, False)]
        return _on_host(b, [*forward, b.rotate_backward(dz, y, rope, F32(1e-5), flag), flag])

    return case


def _embed_case(size: tuple[int, int, int], kind: str) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, width, vocab = size
        ids = b.to_device((words(1, "embed ids", 0, tokens) % np.uint32(vocab)).astype(np.int64))
        sums, flag = b.new_sums((vocab, width)), b.new_flag()
        b.embed_backward(b.to_device(bf16(_floats("embed dx", (tokens, width), kind))), ids, sums, flag)
        return _on_host(b, [b.embed(b.to_device(_floats("embed table", (vocab, width), kind)), ids), sums, flag])

    return case


def _head_case(size: tuple[int, int, int], kind: str) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, width, vocab = size
        flag, sums = b.new_flag(), b.new_sums((vocab, width))
        x = b.quantise_rows(b.to_device(bf16(_floats("head x", (tokens, width), "plain"))), 2, flag)
        w = b.quantise_weight(b.to_device(_floats("head w", (vocab, width), "plain")), "max", flag)
        scale = {"plain": F32(1), "wild": F32(2.0**40), "nonfinite": F32(np.inf)}[kind]
        x = x._replace(scale=_scaled(b, x.scale, scale)) if kind == "wild" else x
        w = w._replace(scale=_scaled(b, w.scale, scale)) if kind == "nonfinite" else w
        ids = b.to_device((words(1, "head ids", 0, tokens) % np.uint32(vocab)).astype(np.int64))
        nll, lse2, dx = b.head_backward(x, w, ids, F32(2e-4), sums, flag)
        losses = (*b.head(x, w, ids, flag), nll, lse2)
        return _on_host(b, [*map(int, losses), dx, sums, flag])

    return case


def _head_limit_case(reach: np.float32, two_z: np.float32) -> Callable[[ModuleType], list[Any]]:
    """The target's part of the weight's gradient reaches `reach` · 2²⁶; the softmax's, with p = ½, half of it times
    1 + 2z·lse."""

    def case(b: ModuleType) -> list[Any]:
        tokens, width, vocab = 3, 9, 2
        flag, sums = b.new_flag(), b.new_sums((vocab, width))
        code = np.full((tokens, width), 127, np.int8)
        scale = np.full(tokens, reach * F32(2.0**26) / F32(tokens * INT16_MAX), F32)
        x = Rows(*map(b.to_device, (code, np.zeros_like(code), scale)))
        w = b.quantise_weight(b.to_device(np.full((vocab, width), 2.0**-27, F32)), "max", flag)
        nll, lse2, dx = b.head_backward(x, w, b.to_device(np.zeros(tokens, np.int64)), two_z, sums, flag)
        return _on_host(b, [int(nll), int(lse2), dx, sums, flag])

    return case


def _optimizer_case(size: tuple[int, int, int], kind: str) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        shape = (size[2], size[1])
        values = np.nan_to_num(_floats("optimizer g", shape, kind), nan=0.0, posinf=3e6, neginf=-3e6)
        sums = (np.clip(values, F32(-1e9), F32(1e9)) * F32(2.0**24)).astype(np.int64) * np.int64(3) + np.int64(1)
        sums = b.to_device(sums)
        p, m = (b.to_device(_floats(f"optimizer {name}", shape, "plain")) for name in "pm")
        v = b.to_device(np.abs(_floats("optimizer v", shape, "plain")))
        constants = (2.0**-30, 0.7, 3e-3, 0.9997, 0.9, 0.1, 0.95, 0.05, 5.26, 10.3, 1e-8)
        squares = b.square_rows(sums, F32(2.0**-30))
        b.adamw(p, m, v, sums, AdamScalars(*map(F32, constants)))
        return _on_host(b, [squares, p, m, v])

    return case


def _beyond_case(beyond: bool) -> Callable[[ModuleType], list[Any]]:
    """Finite values whose sum is the largest float32, or rounds beyond it: that counts as a row that is not finite."""

    def case(b: ModuleType) -> list[Any]:
        last = F32(2.0**127 - 2.0**103) if beyond else F32(2.0**127 - 2.0**104)
        x = b.to_device(np.array([[2.0**127, last], [-(2.0**127), -last], [1, 2.0**-64]], F32))
        y = b.to_device(bf16(np.full((2, 8), 1.5 * 2.0**62 if beyond else 2.0**62, F32)))
        flags = [b.new_flag() for _ in range(3)]
        sums, w = b.fixed_sum(x, flags[0]), b.quantise_weight(x, "lsq", flags[1])
        rows, r = b.norm_rows(y, b.to_device(np.ones(8, F32)), F32(1e-5), 1, flags[2])
        return _on_host(b, [sums, w, rows, r, *flags])

    return case


def _largest_sums_case(b: ModuleType) -> list[Any]:
    """Sums over all of int64, whose conversion to f32 must round once."""
    draws = words(7, "optimizer largest sums", 0, 2 * 61 * 43).astype(np.uint64).reshape(61, 43, 2)
    sums = ((draws[..., 0] << np.uint64(32)) | draws[..., 1]).view(np.int64)
    return _on_host(b, [b.square_rows(b.to_device(sums), F32(2.0**-45))])


def _leaves_case(shape: tuple[int, ...], dtype: str) -> Callable[[ModuleType], list[Any]]:
    """Leaf digests of one chunk, of many, of whole and broken powers of two, and of a shorter last leaf."""

    def case(b: ModuleType) -> list[Any]:
        count = math.prod(shape) * np.dtype(dtype).itemsize // 4
        x = words(7, "leaves", 0, count).view(dtype).reshape(shape)
        return [np.frombuffer(b.leaves_of({"x": b.to_device(x)})["x"], np.uint32)]

    return case


def _attention_case(shape: AttentionShape, kind: str, windows: int = 2) -> Callable[[ModuleType], list[Any]]:
    def case(b: ModuleType) -> list[Any]:
        tokens, flag = windows * shape.sequence, b.new_flag()
        rows = {}
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            spread = "wild" if kind == "wild" and name == "v" else "plain"
            values = bf16(_floats(f"attention {name}", (tokens * heads, shape.width), spread))
            rows[name] = b.quantise_rows(b.to_device(values), 1, flag)
        q = rows["q"]._replace(scale=_scaled(b, rows["q"].scale, F32(0.2)))
        d_out = b.to_device(bf16(_floats("attention d", (tokens, shape.heads * shape.width), kind)))
        saved = b.attention(q, rows["k"], rows["v"], shape)
        return _on_host(b, [*saved, *b.attention_backward(q, rows["k"], rows["v"], saved, d_out, shape, flag), flag])

    return case


def _floats(name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """f32 inputs: "plain" is normal; "wild" spreads scales from 2⁻¹²⁰ to 2⁶⁰ and plants zeros; "nonfinite" plants ∞ and
    NaN."""
    count = int(np.prod(shape, dtype=np.int64))
    values = normal_cut(words(7, name, 0, count))
    other = words(7, name + " kind", 0, count)
    if kind == "wild":
        exponent = (other % np.uint32(181)).astype(np.int32) - np.int32(120)
        values = np.ldexp(values, exponent)
        values[other % np.uint32(11) == 0] = 0
    if kind == "nonfinite":
        values[other % np.uint32(97) == 0] = np.inf
        values[other % np.uint32(97) == 1] = np.nan
    return values.reshape(shape).astype(np.float32)


def _scaled(b: ModuleType, scale: Any, factor: np.float32) -> Any:
    """A quantiser's scales times a factor, rounded on the host."""
    return b.to_device(b.to_host(scale) * factor)


def _on_host(b: ModuleType, outputs: list[Any]) -> list[Any]:
    """Outputs as host arrays; a weight's layout stays behind, since it counts for nothing."""
    result: list[Any] = []
    for output in outputs:
        if isinstance(output, Weight):
            result.append(Weight(b.to_host(output.hi), b.to_host(output.scale)))
        elif isinstance(output, Rows):
            result.append(Rows(*(None if part is None else b.to_host(part) for part in output)))
        else:
            result.append(output if isinstance(output, int) else b.to_host(output))
    return result


def _digest(outputs: list[Any]) -> str:
    """One digest over arrays, integers and quantised rows, in order; a backend's own layout of a weight counts for
    nothing."""
    parts: list[str] = []
    for index, output in enumerate(outputs):
        if isinstance(output, Rows):
            parts += [_digest([output.hi, output.lo, output.scale])]
        elif isinstance(output, Weight):
            parts += [_digest([output.hi, output.scale])]
        elif isinstance(output, np.ndarray):
            parts += [digest.tensor_digest(str(index), output)]
        else:
            parts += [str(output)]
    return digest.digest(canonical.dumps(parts), "vector")


def write() -> None:
    """Let the reference write the vectors."""
    from kernels import reference

    FILE.write_text(json.dumps(dict(run(reference)), indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    write()
