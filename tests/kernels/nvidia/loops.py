"""Reads Triton's TTIR for sums of floats over an index: reductions of floats, and float arithmetic that a loop carries.

A module becomes a graph of its values: an operation's operands lead to its results; what a loop starts with and what
its body yields lead to the values that it carries. Float arithmetic on a cycle of that graph is carried from turn to
turn, through whatever else the cycle passes.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from triton._C.libtriton import ir

ARITHMETIC = {"arith.addf", "arith.subf", "arith.mulf", "arith.divf", "math.fma", "tt.precise_divf"}
MAXIMA = {"arith.maxnumf", "arith.minnumf"}  # of many in any order the same, unless NaN or both zeros are among them
COMBINING = {"tt.reduce.return", "tt.scan.return"}
PRODUCTS = {"tt.dot", "tt.dot_scaled", "tt.atomic_rmw"}
INSIDE = {"scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"}
FLOATS = ("f16", "bf16", "f32", "f64", "f8")
Graph = dict[int, set[int]]


@dataclass(frozen=True)
class Operation:
    """One operation: ids of its values; those of the block that it stands in; the regions around and within it."""

    name: str
    operands: list[int]
    results: list[int]
    block: list[int]
    around: int
    within: list[int]
    floats: bool  # whether an operand is a float, or a tensor of floats
    where: str


def float_reductions(ttir: str, maxima: bool = False) -> list[str]:
    """The operations that reduce, scan, multiply as matrices or add atomically in floats; `maxima` may be taken."""
    found, wrong = operations(ttir), []
    for op in found:
        if op.name in COMBINING and op.floats:
            by = [other.name for other in found if other.around == op.around and other.name not in COMBINING]
            if not maxima or not set(by) <= MAXIMA:
                wrong.append(f"{op.name.removesuffix('.return')} by {' and '.join(by)} at {op.where}")
        elif op.name in PRODUCTS and op.floats:
            wrong.append(f"{op.name} at {op.where}")
    return wrong


def carried(ttir: str) -> list[str]:
    """The operations of float arithmetic that lie on a cycle."""
    found = operations(ttir)
    graph, backward, carries = _graph(found), defaultdict(set), set()
    for source, targets in graph.items():
        for target in targets:
            backward[target].add(source)
    for op in found:
        carries |= set(op.block) if op.name in INSIDE else set()
    cycles: set[int] = set()
    for value in carries:
        cycles |= _reached(graph, value) & _reached(backward, value)
    return [f"{op.name} at {op.where}" for op in found if op.name in ARITHMETIC and cycles & set(op.results)]


def operations(ttir: str) -> list[Operation]:
    """All operations of a module."""
    context = ir.context()
    ir.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(ttir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    found: list[Operation] = []
    module.walk(lambda op: found.append(_operation(op)))
    return found


def _operation(op: Any) -> Operation:
    operands = [op.get_operand(i) for i in range(op.get_num_operands())]
    results = [op.get_result(i) for i in range(op.get_num_results())]
    block = op.get_block() if op.get_name() != "builtin.module" else None
    return Operation(
        op.get_name(),
        [value.id() for value in operands],
        [value.id() for value in results],
        [block.get_argument(i).id() for i in range(block.get_num_arguments())] if block else [],
        block.get_parent().id() if block else 0,
        [op.get_region(i).id() for i in range(op.get_num_regions())],
        any(_is_float(str(value.get_type())) for value in operands),
        _place(str((results or operands)[0].get_loc())) if results or operands else "",
    )


def _place(location: str) -> str:
    """The lines of a location, the innermost first: `digest.py:42`."""
    return " in ".join(f"{file}:{line}" for file, line in re.findall(r'([^"/]+)":(\d+):', location))


def _is_float(type_name: str) -> bool:
    """Of `f32` or `tensor<4x8xf32>`; a pointer to floats is none."""
    return "ptr" not in type_name and type_name.removesuffix(">").split("x")[-1].split(",")[0].startswith(FLOATS)


def _graph(found: list[Operation]) -> Graph:
    holders = {region: op for op in found for region in op.within}
    first = {op.around: op.block for op in found if op.name == "scf.condition"}
    graph: Graph = defaultdict(set)

    def lead(sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets):
            graph[source].add(target)

    for op in found:
        if op.name not in INSIDE and not op.name.startswith("scf."):
            for operand in op.operands:
                graph[operand] |= set(op.results)
        elif op.name == "scf.yield":
            holder = holders[op.around]
            if holder.name == "scf.for":
                lead(op.operands, op.block[1:])
                lead(holder.operands[3:], op.block[1:])
                lead(holder.operands[3:], holder.results)
            if holder.name == "scf.while":
                lead(op.operands, first[holder.within[0]])
            else:
                lead(op.operands, holder.results)
        elif op.name == "scf.condition":
            holder = holders[op.around]
            lead(holder.operands, op.block)
            lead(op.operands[1:], holder.results)
            lead(op.operands[1:], _after(found, holder))
    return graph


def _after(found: list[Operation], loop: Operation) -> list[int]:
    """The arguments of a while's second half."""
    return next(op.block for op in found if op.name == "scf.yield" and op.around == loop.within[1])


def _reached(graph: Graph, start: int) -> set[int]:
    seen: set[int] = set()
    left = [start]
    while left:
        following = graph.get(left.pop(), set()) - seen
        seen |= following
        left += following
    return seen
