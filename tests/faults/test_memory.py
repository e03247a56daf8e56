"""A kernel that cannot allocate its work space says so: Numba drops what a thread raises, and goes on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# One row of 2^24 values: 16 MiB of codes fit under the cap, 64 MiB of work space do not.
PROGRAM = """
import flows, resource
from pathlib import Path
import numpy as np
from kernels import cpu

flag, rows = cpu.new_flag(), np.full((1, 1 << 24), 0x3F80, np.uint16)
weight, sums = np.ones((1, 1 << 24), np.float32), np.ones((1, 1 << 24), np.int64)
calls = {
    "rows": lambda width: cpu.quantise_rows(rows[:, :width], 1, flag),
    "weight": lambda width: cpu.quantise_weight(np.ascontiguousarray(weight[:, :width]), "lsq", flag),
    "squares": lambda width: cpu.square_rows(sums[:, :width], np.float32(1)),
}
for call in calls.values():
    call(64)  # compiled, and its threads started
for name, call in calls.items():
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), resource.RLIM_INFINITY))
    try:
        call(1 << 24)
        print(name, "went on")
    except MemoryError as error:
        print(name, error)
"""


def test_a_thread_without_work_space_is_an_error() -> None:
    """Rows stayed as they were, silently: results under memory pressure that nobody could explain."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = [f"{name} a thread could not allocate its work space" for name in ("rows", "weight", "squares")]
    assert done.stdout.splitlines() == expected


def test_every_parallel_loop_that_allocates_counts_its_passes() -> None:
    """The same for every kernel, by reading: `done += 1` at the end of each pass, `all_done` after the loop."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "kernels" / "cpu").glob("*.py"))
        for line in uncounted(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def uncounted(tree: ast.Module) -> Iterator[int]:
    """Lines of allocations inside parallel loops that do not count, and in functions that only kernels call."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        options = [ast.unparse(decorator) for decorator in function.decorator_list]
        if "njit(**OPTIONS)" in options:  # may be called within any loop
            yield from allocations(function)
        for loop, after in zip(function.body, [*function.body[1:], None]):
            if isinstance(loop, ast.For) and "prange" in ast.unparse(loop.iter) and not counted(loop, after):
                yield from allocations(loop)


def counted(loop: ast.For, after: ast.stmt | None) -> bool:
    passes = ast.unparse(loop.iter).removeprefix("prange(").removesuffix(")")
    ends = ast.unparse(loop.body[-1]) == "done += 1" and after is not None
    return ends and ast.unparse(after) == f"all_done(done, {passes})"


def allocations(tree: ast.AST) -> Iterator[int]:
    makers = {"empty", "zeros", "ones", "full", "empty_like", "zeros_like", "copy", "astype", "concatenate", "arange"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers:
            yield node.lineno


KERNEL = """
@njit(**PARALLEL)
def kernel(x, out):
    done = 0
    for i in prange(x.shape[0]):
        work = np.empty(x.shape[1], np.float32)
        done += 1
    all_done(done, x.shape[0])
"""


def test_the_check_sees_loops_that_do_not_count() -> None:
    """Each change of a loop that counts must be found."""
    assert not list(uncounted(ast.parse(KERNEL)))
    for old, new in (
        ("        done += 1\n", ""),
        ("    all_done(done, x.shape[0])\n", ""),
        ("all_done(done, x.shape[0])", "all_done(done, x.shape[1])"),
        ("PARALLEL", "OPTIONS"),
    ):
        assert old in KERNEL and list(uncounted(ast.parse(KERNEL.replace(old, new)))) == [6], new
