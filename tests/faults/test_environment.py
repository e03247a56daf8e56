"""No environment variable changes a bit: neither set before the start, nor set when a library has read it already."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import reference
from tests.faults import layer, whole_step

ROOT = Path(__file__).resolve().parents[2]

# Variables by which libraries choose other instructions, other precision, another order or another number of threads.
RUNTIME = {
    **{"OMP_NUM_THREADS": "3", "OMP_DYNAMIC": "true", "OMP_SCHEDULE": "dynamic,1", "KMP_DETERMINISTIC_REDUCTION": "0"},
    **{"MKL_NUM_THREADS": "3", "MKL_DYNAMIC": "TRUE", "MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    **{"OPENBLAS_NUM_THREADS": "3", "OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"},
    **{"ONEDNN_DEFAULT_FPMATH_MODE": "BF16", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    **{"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    **{"PYTORCH_ENABLE_MPS_FALLBACK": "1", "PYTORCH_MPS_FAST_MATH": "1", "NUMBA_NUM_THREADS": "1"},
    **{"PYTHONHASHSEED": "12345", "LC_ALL": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "MALLOC_PERTURB_": "165"},
}
COMPILER = {
    **{"NUMBA_OPT": "1", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "1", "NUMBA_BOUNDSCHECK": "1"},
    **{"NUMBA_DISABLE_INTEL_SVML": "1", "NUMBA_ENABLE_AVX": "0", "NUMBA_FUNCTION_CACHE_SIZE": "1"},
    **{"NUMBA_LLVM_REFPRUNE_PASS": "0", "NUMBA_FULL_TRACEBACKS": "1", "NUMBA_FASTMATH": "1"},
}


def run(module: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "generic:cpu"])
@pytest.mark.parametrize("late", [False, True], ids=["before the start", "too late"])
def test_hostile_variables_change_no_bit(name: str, late: bool) -> None:
    """A workspace variable set after the GPU's runtime had started did nothing, and a warning did not stop the run."""
    found = run("tests.faults.whole_step", name, json.dumps(RUNTIME if late else {}), **({} if late else RUNTIME))
    assert json.loads(found) == whole_step.digests(whole_step.record("reference"))


@pytest.mark.slow
def test_the_compiler_s_variables_change_no_bit(tmp_path: Path) -> None:
    """The same for a compiler, whose cache would also keep what it made under a variable that is long gone."""
    found = json.loads(run("tests.faults.layer", "cpu", NUMBA_CACHE_DIR=str(tmp_path), **COMPILER))
    assert found["digest"] == layer.digests(reference)


def test_a_compiler_that_is_switched_off_is_refused() -> None:
    """What cannot compute by the contract must not start, where others only warned."""
    command = [sys.executable, "-c", "import flows; from storage import engine; engine.self_test('cpu')"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "MachineFault: backend cpu fails" in done.stderr


FETCHES = {
    "kernels/warm.py",  # gives processes that compile beforehand one thread each; their results are dropped
    "storage/cache.py",  # where bytes that came from a server are kept; whoever uses them verifies them
    "storage/corpus/hub.py",  # the mirror from which pinned files come
    "storage/corpus/packages.py",  # the language in which a package manager says what went wrong
    "storage/corpus/pool.py",  # sets how many threads an encoder takes
}


def test_nothing_that_computes_reads_the_environment() -> None:
    """A variable that is read is an input of the function; everything else that is, is in the spec."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in ("kernels", "model", "storage")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in FETCHES
        for line in reads(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def reads(tree: ast.Module) -> Iterator[int]:
    """Lines that name the environment, in whatever way it was imported."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "load_dotenv", "expandvars"}
    fields = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name", ast.Constant: "value"}
    for node in ast.walk(tree):
        named = getattr(node, fields.get(type(node), ""), None)
        if isinstance(named, str) and named.rpartition(".")[2] in names:
            yield getattr(node, "lineno", 0)


@pytest.mark.parametrize(
    "planted",
    [
        "import os\nprint(os.environ['OMP_NUM_THREADS'])",
        "from os import getenv\ngetenv('FAST')",
        "import os as system\nsystem.getenv('FAST')",
        "from os import environ as settings",
        "import os\ngetattr(os, 'environ')",
        "import os.path\nos.path.expandvars('$FAST')",
    ],
)
def test_the_check_sees(planted: str) -> None:
    """Each way to the environment must be found."""
    assert list(reads(ast.parse(planted)))
    assert not list(reads(ast.parse("import os\nprint(os.path.join('a', 'environment'))")))
