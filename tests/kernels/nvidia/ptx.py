"""Every Triton kernel of the NVIDIA backend, compiled without a GPU and read: `make ptx`.

A whole step runs on meta tensors, which have shapes and no values, while each launch only compiles its kernel: so what
is read is what would run, in each specialisation that these shapes bring about (an argument that is 1, divisible by 16,
or beyond 32 bits; each constant). It must fit the processor's shared memory, and three things are read:

    PTX     no float instruction but those in EXACT: no fused multiply-add, no .approx, no .ftz, no other float type
    TTIR    no reduction, scan, dot or atomic of floats, save maxima in kernels of MAY_TAKE_MAXIMA
    TTIR    no float + − × ÷ that a loop carries from turn to turn

Prints one line for each finding and one for the count; exits with 1 where there is a finding.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.interface import AdamScalars
from model.spec import NumericsSpec, RunSpec
from model.transformer import network, unit_gradients, unit_loss
from tests.bench.shapes import WIDTHS_1B
from tests.kernels.nvidia import loops
from tests.model import tiny

ARCHITECTURES = (90, 80)
PACKAGE = "kernels.nvidia"
SHARED_MEMORY = {90: 227 * 1024, 80: 163 * 1024}  # bytes that one block may have (CUDA's programming guide)
# Kernel → why NaN and −0 are not among what it compares.
MAY_TAKE_MAXIMA = {
    "kernels.nvidia.attention._attend": "scores are finite and never −0: two live scales' product never underflows",
}
EXACT = re.compile(
    r"(add|sub|mul|div|sqrt)\.rn\.f32"
    r"|cvt\.rn\.f32\.[su](8|16|32|64)"
    r"|cvt\.rzi\.[su](8|16|32|64)\.f32"  # of whole numbers, by the contract's rounding before it
    r"|(mov|selp|neg|abs|(min|max)(\.NaN)?)\.f32"
    r"|setp\.[a-z.]+\.f32"
    r"|(ld|st)\.[a-z0-9_.:]*\.f32"
)
FLOAT = re.compile(r"\.(b?f16|tf32|f32|f64|f16x2|bf16x2|f32x2|e4m3|e5m2)\b|\.(approx|ftz)\b|^call")


class Compiled(NamedTuple):
    """One kernel in one specialisation for one architecture."""

    name: str
    architecture: int
    fused: bool
    shared: int  # bytes
    ptx: str
    ttir: str


class Driver:
    """What Triton asks of a GPU before it compiles."""

    architecture = ARCHITECTURES[0]

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@contextmanager
def compiling(architectures: tuple[int, ...]) -> Iterator[list[Compiled]]:
    """Within the block a launch compiles its kernel for each architecture and runs nothing; yields what came of it."""
    driver, found, seen, run = Driver(), [], set(), JITFunction.run

    def compile_only(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        for driver.architecture in architectures:
            compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
            if id(compiled) not in seen:
                seen.add(id(compiled))
                kept.append(compiled)
                traits = (compiled.metadata.enable_fp_fusion, compiled.metadata.shared)
                found.append(
                    Compiled(_name(kernel), driver.architecture, *traits, compiled.asm["ptx"], compiled.asm["ttir"])
                )

    kept: list[Any] = []  # so that no id is given twice
    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def findings(compiled: Compiled) -> list[str]:
    """What breaks the contract in one compiled kernel, each with the line that does."""
    wrong = ["may fuse multiply-adds: launch it through numbers.launch"] if compiled.fused else []
    if compiled.shared > (limit := SHARED_MEMORY[compiled.architecture]):
        wrong.append(f"needs {compiled.shared} bytes of shared memory, a block may have {limit}")
    wrong += [f"PTX: {line}" for line in inexact(compiled.ptx)]
    wrong += [f"TTIR: {line}" for line in loops.float_reductions(compiled.ttir, compiled.name in MAY_TAKE_MAXIMA)]
    wrong += [f"carried by a loop: {line}" for line in loops.carried(compiled.ttir)]
    return [f"{compiled.name} for sm_{compiled.architecture}: {text}" for text in dict.fromkeys(wrong)]


def inexact(ptx: str) -> list[str]:
    """The instructions of a PTX text that touch floats and are not in EXACT."""
    code = re.sub(r"//.*", "", ptx)
    statements = [re.sub(r"^(\{|\}|@!?%\w+)\s*", "", part.strip()) for part in re.split(r"[;\n]", code)]
    opcodes = {s.split()[0]: s for s in statements if s and not s.startswith((".", "$", "//"))}
    return [text for opcode, text in opcodes.items() if FLOAT.search(opcode) and not EXACT.fullmatch(opcode)]


def meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step(backend: ModuleType, run: RunSpec) -> None:
    """All that a step of one unit calls, its digests too. Initial weights are torch's operations alone."""
    flag, m = backend.new_flag(), run.model
    weights: dict[str, Any] = {name: meta(shape) for name, shape in m.shapes().items()}
    sums = {name: backend.new_sums(shape) for name, shape in m.shapes().items()}
    windows = np.zeros((run.numerics.unit_windows, m.seq_len + 1), np.int64)
    net = network(run, backend, weights, flag)
    unit_loss(net, windows, flag)
    unit_gradients(net, windows, np.float32(1e-4), sums, flag)
    scalars = AdamScalars(*(np.float32(0.5) for _ in AdamScalars._fields))
    for name, shape in m.shapes().items():
        for gradient in (sums[name], meta(shape)):  # of an exact and of an ordered reduction
            backend.square_rows(gradient, np.float32(2.0**-40))
            backend.adamw(weights[name], meta(shape), meta(shape), gradient, scalars)
        importlib.import_module(f"{PACKAGE}.digest").digests({"weights": weights[name], "sums": sums[name]})
    rows = [shape[0] if len(shape) > 1 else 1 for shape in m.shapes().values()]
    for length in (1, sum(rows)):
        backend.fixed_sum(meta((1, length)), flag)


def runs() -> Iterator[tuple[tuple[int, ...], RunSpec]]:
    """The recipe's widths and lengths, units of four windows and of one; the demo's; and sizes that nothing divides.

    With the architectures to compile for: the second where constants differ, not where only divisibility does."""
    demo = {"vocab": 4096, "d_model": 192, "ffn": 512, "heads": 3, "kv_heads": 1, "head_dim": 64}
    odd = {"vocab": 97, "d_model": 50, "ffn": 83, "heads": 3, "kv_heads": 1, "head_dim": 18}
    both, newest = ARCHITECTURES, ARCHITECTURES[:1]
    for architectures, slices, rule, units, shape, length in (
        (both, 1, "lsq", 4, WIDTHS_1B, 4096),
        (both, 2, "max", 1, WIDTHS_1B, 4096),
        (newest, 1, "max", 1, demo, 4096),
        (newest, 1, "max", 3, odd, 37),
        (both, 2, "lsq", 1, odd, 37),
    ):
        gradients = {"input_gradient_slices": slices, "weight_gradient_slices": slices}
        numbers = NumericsSpec(weight_scale=rule, **gradients, down_slices=slices, unit_windows=units)
        window = min(512, length - 5)
        run = tiny.spec(seq_len=length, windows=units, numerics=numbers, layers=2, window=window, **shape)
        yield architectures, run


def modules() -> list[ModuleType]:
    """The package and its modules, all of whose tensors will be meta tensors."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):  # else the package refuses to be imported
        package = importlib.import_module(PACKAGE)
    found = [package, *(importlib.import_module(f"{PACKAGE}.{m.name}") for m in pkgutil.iter_modules(package.__path__))]
    for module in found:
        if hasattr(module, "DEVICE"):
            module.DEVICE = torch.device("meta")
    return found


def kernels(parts: list[ModuleType]) -> set[str]:
    """The compiled functions of some modules that no other one calls: those that the host launches."""
    compiled = {f for part in parts for f in vars(part).values() if isinstance(f, JITFunction)}
    own = [f for f in compiled if f.fn.__module__.startswith(PACKAGE)]
    calls = [node.func for f in own for node in ast.walk(ast.parse(f.src)) if isinstance(node, ast.Call)]
    called = {ast.unparse(function).split(".")[-1] for function in calls}
    return {_name(f) for f in own if f.fn.__name__ not in called}


def _name(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def check() -> tuple[list[Compiled], list[str]]:
    """(what was compiled, findings) of the whole backend; a kernel that no step launches is a finding too."""
    backend, *parts = modules()
    compiled: list[Compiled] = []
    for architectures, run in runs():
        with compiling(architectures) as new:
            step(backend, run)
        compiled += new
    compiled = list(dict.fromkeys(compiled))
    wrong = [text for one in compiled for text in findings(one)]
    known = kernels(parts)
    missing = known - {one.name for one in compiled}
    wrong += [f"{name}: launched by no step of these shapes, so nobody has read it" for name in sorted(missing)]
    stale = MAY_TAKE_MAXIMA.keys() - known
    wrong += [f"{name} is excepted and does not exist" for name in sorted(stale)]
    return compiled, wrong


def main() -> None:
    start = time.monotonic()
    compiled, wrong = check()
    print("\n".join(wrong))
    names = {one.name for one in compiled}
    targets = " and ".join(f"sm_{architecture}" for architecture in ARCHITECTURES)
    print(
        f"{len(names)} kernels in {len(compiled)} specialisations for {targets}, {len(wrong)} findings, "
        f"{time.monotonic() - start:.0f} s"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
