"""The shape of the project, checked: who may import whom, sizes of files and functions, what is never called."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "storage", "model", "kernels")

# What each package may import beside the standard library: the arrows flows → tasks → storage → model → kernels.
MAY_IMPORT = {
    "kernels": {"kernels", "numpy", "torch", "numba", "triton", "blake3"},
    "model": {"model", "kernels", "numpy", "pydantic", "mpmath"},
    "storage": {
        *("storage", "model", "kernels", "numpy", "pydantic", "yaml"),
        *("pyarrow", "duckdb", "cryptography", "py_ecc", "tokenizers", "fastokens", "blake3"),
        *("huggingface_hub", "fsspec"),
    },
    "tasks": {"tasks", "storage", "model", "kernels", "numpy", "pydantic", "prefect", "prefect_ray"},
    "flows": {"flows", "tasks", "storage", "model", "kernels", "numpy", "pydantic", "prefect", "typer", "rich"},
}
# Modules that may import more than their package, and why.
EXCEPTIONS = {
    ("model/copying.py", "torch"): "copies a state from a device into page-locked memory, on every core",
    ("model/ordered_ranks.py", "torch"): "moves arrays between ranks by torch.distributed",
    ("model/ranks.py", "torch"): "the same, and adds integers",
    ("storage/generation.py", "torch"): "asks whether a device is here, on which the plain model is to lie",
    ("storage/generation.py", "safetensors"): "names its error",
    ("storage/plain_model.py", "torch"): "published beside the weights for whoever has no code of ours",
    ("storage/plain_model.py", "safetensors"): "the same",
    ("storage/s3_requests.py", "botocore"): "speaks to S3 servers; only who has a store there installs it",
    ("storage/watch.py", "torch"): "ranks tell how far they are through the store of torchrun's launcher",
    ("model/wire.py", "torch"): "the same",
    ("tasks/lm_eval_child.py", "lm_eval"): "runs in lm-eval's own environment; never imported",
    ("tasks/lm_eval_child.py", "torch"): "the same",
    ("tasks/lm_eval_child.py", "datasets"): "the same",
    ("tasks/lm_eval_child.py", "jinja2"): "the same",
    ("tasks/lm_eval_child.py", "tokenizers"): "the same",
    ("tasks/progress.py", "httpx"): "knows what Prefect's client raises where the server is away",
    ("tasks/process.py", "torch"): "asks torchrun which options it has",
}
# The types that all backends share, which obey the same rule as the reference.
SHARED_TYPES = "kernels/interface.py"
REFERENCE_MAY_IMPORT = {"kernels.reference", "kernels.interface", "kernels.digest", "numpy"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60

# Reading any of these formats can run code that a run's author wrote.
EXECUTABLE_FORMATS = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "eval", "exec"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def all_sources() -> list[Path]:
    return [path for package in PACKAGES for path in sources(package)]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every (line, dotted module) that a file imports anywhere, relative imports made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a name or attribute chain; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources(package)
        for line, module in imports(path)
        if (top := module.split(".")[0]) not in sys.stdlib_module_names
        and top not in MAY_IMPORT[package]
        and (path.relative_to(ROOT).as_posix(), top) not in EXCEPTIONS
    ]
    assert not wrong, "\n".join(wrong)


def test_reference_imports_numpy_and_standard_library_only() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in [*sources("kernels/reference"), ROOT / SHARED_TYPES]
        for line, module in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(f"{module}.".startswith(f"{allowed}.") for allowed in REFERENCE_MAY_IMPORT)
    ]
    assert not wrong, "\n".join(wrong)


def test_fast_backends_share_no_code_with_the_reference() -> None:
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in sources("kernels")
        if path.relative_to(ROOT).parts[1] not in ("reference", "__init__.py", "vectors.py", "conformance.py")
        for line, module in imports(path)
        if module.startswith("kernels.reference")
    ]
    assert not wrong, "\n".join(wrong)


def test_all_packages_come_from_this_folder() -> None:
    """A package named `kernels` exists on the package index too; the wrong one must not be found first."""
    folders = {name: Path(str(importlib.import_module(name).__file__)).resolve().parent.parent for name in PACKAGES}
    assert set(folders.values()) == {ROOT}, folders


def test_no_format_that_can_execute_and_no_eval() -> None:
    wrong = []
    for path in all_sources():
        wrong += [f"{where(path, n)} imports {m}" for n, m in imports(path) if m.split(".")[0] in EXECUTABLE_FORMATS]
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            if dotted(node.func) in FORBIDDEN_CALLS or any(keyword.arg == "allow_pickle" for keyword in node.keywords):
                wrong.append(f"{where(path, node.lineno)} calls {dotted(node.func)}")
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_short() -> None:
    wrong = []
    for path in [*all_sources(), *sources("tests")]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{where(path, 1)} has {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{where(path, node.lineno)} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_every_function_is_typed() -> None:
    wrong = []
    for path in all_sources():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_compiled(node):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if untyped or node.returns is None:
                wrong.append(f"{where(path, node.lineno)} {node.name}: {untyped or 'no return type'}")
    assert not wrong, "\n".join(wrong)


def is_compiled(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for Numba functions, whose types stand in their signature or docstring."""
    names = [dotted(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
    return any(name.split(".")[-1] in ("njit", "jit", "vectorize", "guvectorize") for name in names)


def test_no_paths_or_hosts_of_one_machine() -> None:
    """Neither this machine's folders nor a package index's host name belongs in the sources."""
    pattern = re.compile(
        r"(?<![\w.])/(?:" + "|".join(("work", "root", "home")) + r")/"
        r"|\b(?:"
        + "|".join((r"pypi\.org", r"python" + r"hosted\.org", r"registry\.npm" + r"js", r"conda\.anaconda"))
        + r")"
    )
    files = [*all_sources(), *sources("tests"), *(ROOT / "deployments").rglob("*.yaml")]
    files += [ROOT / name for name in ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "CHANGELOG.md")]
    wrong = [
        f"{where(path, number)}: {line.strip()}"
        for path in files
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not wrong, "\n".join(wrong)
