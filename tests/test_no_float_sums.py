"""No float is ever summed over an index in `kernels/` and `model/`: rule 1 of the contract, checked by reading.

A reduction must say that it sums integers (`dtype=np.int64` or `np.int32`), or stand in SITES with the reason why no
order of its additions can change its result; or in ORDERED, the one place where floats are added over an index, in an
order that is written down, for runs that ask for it. `tests/kernels/test_float_sums_at_run_time.py` watches real steps
for what this cannot see. Triton's kernels, whose types no reader knows, are compiled instead and then read:
`tests/kernels/nvidia/ptx.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "model")
COMPILED = "kernels/nvidia/"  # where each function compiled by Triton is in the compiled check, or a finding of it

# Everything by which NumPy, torch, Python or an array method adds up elements.
REDUCTIONS = {
    *("sum", "nansum", "fsum", "sumprod", "mean", "nanmean", "fmean", "average", "cumsum", "cumulative_sum"),
    *("var", "std", "norm", "trace", "logsumexp", "softmax", "log_softmax", "logcumsumexp", "cross_entropy"),
    *("dot", "vdot", "vecdot", "inner", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "einsum"),
    *("tensordot", "linear", "bilinear", "convolve", "correlate", "conv1d", "conv2d", "multi_dot", "matrix_power"),
    *("scaled_dot_product_attention", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce"),
    *("bincount", "histogram", "trapezoid", "interp", "reduce", "reduceat", "accumulate", "at"),
    *("layer_norm", "rms_norm", "normalize", "cdist", "allreduce", "all_reduce", "gemm", "sgemm", "dgemm"),
    "float_add",  # model.ordered's own: an element-wise addition, but of one rank's floats to another's
}
INTEGER_DTYPES = {"np.int64", "np.int32", "torch.int64", "torch.int32"}

# (file, function, what): why the order of the additions cannot matter there.
SITES = {
    ("kernels/reference/products.py", "integer_product", "@"): "int8 codes in float64: every partial sum is below 2^53",
    ("kernels/cpu/products.py", "_float32", "torch.mm"): "slices of 1,024 codes: every partial sum is below 2^24",
    ("kernels/cpu/products.py", "exact", "@"): "the probe's own truth, in float64 below 2^53",
    ("kernels/generic/products.py", "_float32", "@"): "codes in slices of 1,024 terms: every partial sum is below 2^24",
    ("kernels/reference/layers.py", "embed_backward", "np.add.at"): "int64 into int64",
    ("kernels/reference/head.py", "head_backward", "np.subtract.at"): "int64 into int64",
    ("kernels/reference/fingerprint.py", "fingerprint", "sum"): "Python's integers",
    ("kernels/cpu/fingerprint.py", "fingerprint", "sum"): "the same",
    ("kernels/nvidia/digest.py", "digests", "sum"): "numbers of leaves, in Python's integers",
    ("kernels/nvidia/linear.py", "linear_backward", "sum"): "widths, in Python's integers",
    ("kernels/nvidia/transpose.py", "gradient_codes", "sum"): "the same",
    ("kernels/nvidia/transpose.py", "_grid", "sum"): "numbers of tiles, in Python's integers",
    ("model/memory.py", "total", "sum"): "bytes, in Python's integers; no array is near",
    ("model/memory.py", "_stages", "sum"): "the same",
    ("model/ranks.py", "total", "dist.all_reduce"): "int64",
    ("model/ranks.py", "ordered", "sum"): "numbers of bytes, in Python's integers",
    ("model/ordered_step.py", "joined", "sum"): "numbers of elements, in Python's integers",
    ("model/ordered_ranks.py", "own_mean", "sum"): "the same",
    ("model/rows.py", "_cut", "sum"): "numbers of elements, in Python's integers",
    ("model/memory.py", "sizes", "sum"): "the same",
    ("model/wire.py", "_starts", "accumulate"): "numbers of elements, in Python's integers",
    ("model/device_memory.py", "_stages", "sum"): "the same",
}
# (file, function, what): where floats are added over an index, and what fixes the order. The report's reduction, whose
# result depends on the order, kept for runs recorded that way; no other module may use it (see USERS).
ORDERED = {
    ("model/ordered.py", "ascending_sum", "float_add"): "a running sum in ascending order of micro-batches or shards",
    ("model/ordered.py", "push", "float_add"): "binary carries: blocks of one size, lower replica on the left",
    ("model/ordered.py", "result", "float_add"): "blocks of several sizes, in the order that `residual` names",
    ("model/ordered_ranks.py", "all_reduce_sum", "float_add"): "a butterfly: the tree of `push`",
    ("model/ordered_ranks.py", "_joined_blocks", "float_add"): "the order of `result`",
}
# Off by default: these reach a step only through `ordered` of its group, which it calls for a spec that says so.
USERS = {
    ("model/spec.py", "model.ordered"),  # the names of its choices
    ("model/memory.py", "model.ordered_step"),  # how much it holds
    ("model/ordered_step.py", "model.ordered"),
    ("model/ordered_ranks.py", "model.ordered"),
    ("model/ordered_ranks.py", "model.ordered_step"),
    ("model/group.py", "model.ordered"),
    ("model/group.py", "model.ordered_step"),
    ("model/ranks.py", "model.ordered"),
    ("model/ranks.py", "model.ordered_step"),
    ("model/ranks.py", "model.ordered_ranks"),
}


def test_no_float_sum_is_written() -> None:
    found = {(path, name, what): line for path, name, what, line in reductions() if not _is_ordered(what)}
    wrong = [f"{site[0]}:{line} {site[1]}: {site[2]}" for site, line in found.items() if site not in SITES]
    assert not wrong, "sums that may be of floats; say dtype=np.int64, or explain them in SITES:\n" + "\n".join(wrong)
    assert not (stale := SITES.keys() - found.keys()), f"sites that no longer exist: {stale}"


def test_floats_are_added_over_an_index_in_one_place() -> None:
    assert {(path, name, what) for path, name, what, _ in reductions() if _is_ordered(what)} == ORDERED.keys()


def _is_ordered(what: str) -> bool:
    return what.split(".")[-1] == "float_add"


def test_nothing_uses_the_ordered_sums_unasked() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), module)
        for folder in (*FOLDERS, "storage", "tasks", "flows")
        for path in (ROOT / folder).rglob("*.py")
        for module in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if module in ("model.ordered", "model.ordered_step", "model.ordered_ranks")
    }
    assert found == USERS


def _imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, and every name from one, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reductions() -> Iterator[tuple[str, str, str, int]]:
    """(file, innermost function, what, line) of every reduction that does not state an integer type."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield from _visit(tree, path.relative_to(ROOT).as_posix(), "<module>")


def _visit(node: ast.AST, path: str, function: str) -> Iterator[tuple[str, str, str, int]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
        if path.startswith(COMPILED) and any(map(_is_triton, node.decorator_list)):
            return
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
        yield path, function, "@", node.lineno
    if isinstance(node, ast.Call) and _name(node.func) in REDUCTIONS and not _states_integers(node):
        yield path, function, ast.unparse(node.func), node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _visit(child, path, function)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_triton(decorator: ast.expr) -> bool:
    """Of `@triton.jit` and `@triton.jit(...)`."""
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) == "triton.jit"


def _states_integers(call: ast.Call) -> bool:
    return any(k.arg == "dtype" and ast.unparse(k.value) in INTEGER_DTYPES for k in call.keywords)


def test_the_check_sees_sums() -> None:
    """Each of these would change bits with the order of its additions; each must be found."""
    for text in ("np.sum(x)", "x.mean(axis=1)", "a @ b", "torch.einsum('ij,jk', a, b)", "sum(xs)", "np.add.reduce(x)"):
        assert list(_visit(ast.parse(text), "here", "f")), text
    assert list(_visit(ast.parse("ordered.float_add(a, b)"), "here", "f"))
    assert not list(_visit(ast.parse("np.sum(x, axis=1, dtype=np.int64)"), "here", "f"))
    for text in ("import model.ordered", "from model import ordered", "from model.ordered import replay"):
        assert "model.ordered" in _imported(ast.parse(text)), text


def test_only_compiled_kernels_are_left_to_the_compiled_check() -> None:
    kernel, host = "{}\ndef f(x):\n    return tl.sum(x)", "def g(x):\n    return x.sum()"
    for decorator in ("@triton.jit", "@triton.jit(do_not_specialize=['x'])"):
        both = ast.parse(f"{kernel.format(decorator)}\n{host}")
        assert [found[1] for found in _visit(both, "kernels/nvidia/layers.py", "")] == ["g"]
        assert [found[1] for found in _visit(both, "kernels/cpu/layers.py", "")] == ["f", "g"]
    for decorator in ("", "@numba.njit", "@jit"):
        assert list(_visit(ast.parse(kernel.format(decorator)), "kernels/nvidia/layers.py", "")), decorator
