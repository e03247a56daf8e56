"""What the compiler made of a Numba kernel: doubles, contracted or reordered sums, sums of floats over an index.

The text looked at is the optimised LLVM IR of a sequential compilation (loops over threads become loops), with every
called function of the package inside, and its assembly. A sum into an array element that no register holds from one
iteration to the next (`out[j] += x[i, j]`) cannot be told from a named sum here: review has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from numba import njit

DEFINED = re.compile(r"^\s*(%[\w.\"$-]+) = (?:tail )?(\w+)")
NAME = re.compile(r"%[\w.$-]+|%\"[^\"]+\"")
FLAGS = r"fast|reassoc|contract|arcp|afn|nnan|ninf|nsz"
FORBIDDEN = {
    "double precision": re.compile(r"\bdouble\b"),
    "a relaxed float operation": re.compile(rf"\b(?:fadd|fsub|fmul|fdiv|fneg|frem|fcmp|call) (?:{FLAGS})\b"),
    "a contracted product and sum": re.compile(r"@llvm\.(?:fma|fmuladd)\.|@fmaf?\b"),
    "a sum over a vector": re.compile(r"@llvm\.(?:experimental\.)?vector\.reduce\.(?:v2\.)?f(?:add|mul)"),
    "a call into a mathematical library": re.compile(
        r"@llvm\.(?:exp|log|pow|sin|cos|tan|asin|acos|atan|sinh)|\bcall [^@]*float[^@]*@(?!llvm\.|_ZN)"
    ),
}
CONTRACTED = re.compile(r"^\s*(v?fn?m(?:add|sub)\w*|fml[as]|fmadd|fnmadd)\s", re.MULTILINE)


def kernels(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The kernels of a module that Python calls, by name; what only they call is inside them."""
    for name, value in vars(module).items():
        if hasattr(value, "py_func") and value.__module__ == module.__name__:
            if not value.targetoptions.get("no_cpython_wrapper"):
                yield f"{module.__name__}.{name}", value


def problems(dispatcher: Any) -> list[str]:
    """What is wrong with a kernel, for each signature it has been called with."""
    found = []
    for signature in dispatcher.signatures:
        fastmath = dispatcher.targetoptions.get("fastmath", False)
        # Without the wrapper that takes Python's floats, which are double.
        options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        fresh = njit(fastmath=fastmath, **options)(dispatcher.py_func)
        fresh.compile(signature)
        found += problems_of(fresh.inspect_llvm(signature), fresh.inspect_asm(signature))
    return found


def problems_of(ir: str, assembly: str) -> list[str]:
    """What is wrong with optimised LLVM IR and its assembly; empty if nothing is."""
    found = []
    for line in ir.splitlines():
        # Declarations and strings name types and symbols that nothing here uses.
        if not line.startswith(("declare", "@", "!", ";", "source_filename")):
            found += [f"{what}: {line.strip()[:120]}" for what, pattern in FORBIDDEN.items() if pattern.search(line)]
    found += [f"a contracted instruction: {match}" for match in CONTRACTED.findall(assembly)]
    for function in re.split(r"^define ", ir, flags=re.MULTILINE)[1:]:
        found += [f"a sum of floats over an index: {line}" for line in sums_over_an_index(function)]
    return found


def sums_over_an_index(function: str) -> list[str]:
    """The float additions whose result comes back to them: in SSA form that is possible only around a loop."""
    operands: dict[str, list[str]] = {}
    additions: dict[str, str] = {}
    for line in function.split("\n}")[0].splitlines():
        if match := DEFINED.match(line):
            name, operation = match.groups()
            operands[name] = NAME.findall(line.split("=", 1)[1])
            if operation in ("fadd", "fsub"):
                additions[name] = line.strip()[:120]
    return [line for name, line in additions.items() if name in reachable(name, operands)]


def reachable(start: str, operands: dict[str, list[str]]) -> set[str]:
    """Everything that the value `start` is computed from."""
    seen: set[str] = set()
    waiting = list(operands[start])
    while waiting:
        name = waiting.pop()
        if name not in seen and name in operands:
            seen.add(name)
            waiting += operands[name]
    return seen
