"""Sums over ranks: joint or apart, in any order, in any number of chunks; and nothing in the project sums floats so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels.interface import GradientSlices, Part
from kernels.reference.numbers import bf16
from model import host
from model.state import initial_state
from model.transformer import network, unit_gradients
from tests.faults import ranks
from tests.model import tiny

ROOT = Path(__file__).resolve().parents[2]
WORLD = 6


@pytest.fixture(scope="module")
def gradients() -> list[list[np.ndarray]]:
    """Two tensors' int64 gradients of each of six ranks, a unit each; with extremes that use all of the headroom."""
    run, b = tiny.spec(windows=WORLD), kernels.backend("cpu")
    flag = b.new_flag()
    net = network(run, b, initial_state(run, b).weights, flag)
    found = []
    for window in tiny.windows(run, 0, WORLD):
        sums = {name: b.new_sums(shape) for name, shape in run.model.shapes().items()}
        unit_gradients(net, window[None, :], host.f32("0.0002"), sums, flag)
        found.append([sums[name].reshape(-1) for name in ("head", "blocks.001.gate_up")])
    for rank, (first, second) in enumerate(found):
        first[:2], second[-2:] = (2**60, -(2**60)), ((-1) ** rank * 2**60, 3)
    return found


def in_floats(parts: list[np.ndarray]) -> list[np.ndarray]:
    """The same gradients as others would reduce them."""
    return [part.astype(np.float32) * np.float32(2.0**-24) for part in parts]


def test_fused_and_separate_reductions_agree(gradients: list[list[np.ndarray]]) -> None:
    """Two tensors reduced in one buffer gave other bits than one by one: the place in the buffer set the order."""
    four = gradients[:4]

    def both(kind: type) -> tuple[bytes, bytes]:
        given = [in_floats(parts) if kind is np.float32 else parts for parts in four]
        joint = ranks.ring([np.concatenate(parts) for parts in given], 4)
        apart = [ranks.ring([parts[tensor] for parts in given], 4) for tensor in range(2)]
        return joint.tobytes(), np.concatenate(apart).tobytes()

    assert len(set(both(np.int64))) == 1
    assert len(set(both(np.float32))) == 2  # floats do differ: the test can fail


def test_a_fused_weight_s_gradient_is_that_of_its_parts() -> None:
    """The same where a rank sums over its own tokens: rows of a weight do not notice which others lie beside them."""
    random = np.random.default_rng(5)
    for name in (*kernels.HOSTS, "generic:cpu"):
        b = kernels.backend(name)
        flag = b.new_flag()
        x = b.quantise_rows(b.to_device(bf16(random.standard_normal((70, 33)).astype(np.float32))), 1, flag)
        w, dy = random.standard_normal((48, 33)).astype(np.float32), bf16(random.standard_normal((70, 48), np.float32))
        found = []
        for cuts in ((0, 48), (0, 17, 48)):
            pieces = [slice(*pair) for pair in pairwise(cuts)]
            sums = [b.new_sums((piece.stop - piece.start, 33)) for piece in pieces]
            for piece, own in zip(pieces, sums):
                weight = b.quantise_weight(b.to_device(w[piece].copy()), "max", flag)
                b.linear_backward(x, (Part(b.to_device(dy[:, piece].copy()), weight, own),), GradientSlices(1, 1), flag)
            found.append(b"".join(b.to_host(own).tobytes() for own in sums))
        assert found[0] == found[1], name


def orders() -> list[list[int]]:
    """Placements of six ranks."""
    random = np.random.default_rng(6)
    return [list(range(WORLD)), *(random.permutation(WORLD).tolist() for _ in range(12))]


def test_placement_of_ranks_changes_no_bit(gradients: list[list[np.ndarray]]) -> None:
    """Repeatability was lost when ranks landed on other GPUs: the ring's order follows the hardware."""
    whole = [np.concatenate(parts) for parts in gradients]
    exact = {f([whole[rank] for rank in order]).tobytes() for order in orders() for f in (_ring, ranks.tree)}
    assert len(exact) == 1
    floats = in_floats(whole)
    assert len({_ring([floats[rank] for rank in order]).tobytes() for order in orders()}) > 1


def _ring(parts: list[np.ndarray]) -> np.ndarray:
    return ranks.ring(parts, WORLD)


def test_number_of_channels_changes_no_bit(gradients: list[list[np.ndarray]]) -> None:
    """Another number of channels gave another sum, and another convergence: each channel adds in its own order."""
    whole = [np.concatenate(parts) for parts in gradients]
    assert len({ranks.ring(whole, chunks).tobytes() for chunks in (1, 3, 16)}) == 1
    assert len({ranks.ring(in_floats(whole), chunks).tobytes() for chunks in (1, 3, 16)}) > 1


# (file, line's function, what): collectives and atomics whose operands are proven to be integers.
INTEGER_SITES = {
    ("model/ranks.py", "<module>", "torch.distributed"): "its collectives stand here one by one",
    ("model/ranks.py", "__init__", "nccl"): "a name",
    ("model/ranks.py", "launched", "gloo"): "a name",
    ("model/ranks.py", "scattered", "gloo"): "a name",
    ("storage/watch.py", "<module>", "torch.distributed.TCPStore"): "what ranks tell each other of themselves",
    ("tasks/process.py", "_start", "torch.distributed.run.get_args_parser"): "which options torchrun has",
    ("model/ranks.py", "_reduce_scatter", "self.wire.reduce_scatter"): "of the module below: int64",
    ("model/wire.py", "<module>", "torch.distributed"): "its collectives stand here one by one",
    ("model/wire.py", "<module>", "REDUCE_SCATTER"): "a name",
    ("model/wire.py", "<module>", "reduce_scatter_single"): "a name",
    ("model/wire.py", "<module>", "dist.reduce_scatter_tensor"): "a name",
    ("model/wire.py", "reduce_scatter", "REDUCE_SCATTER"): "int64, made by the function itself",
    ("model/ranks.py", "joined", "self._reduce_scatter"): "the module's own function: moves int64 and adds them",
    ("model/ranks.py", "total", "dist.all_reduce"): "int64",
}
# Those that no library adds in: the ordered reduction moves bytes, and adds in an order of its own (model/ordered.py).
MOVING_SITES = {
    ("model/ordered_ranks.py", "<module>", "torch.distributed"): "all-to-all, send, receive and broadcast",
    ("model/ordered_ranks.py", "ordered_mean", "all_reduce_sum"): "the module's own function",
    ("model/ordered_ranks.py", "_group", "gloo"): "a name",
    ("tasks/process.py", "_start", "GLOO_SOCKET_IFNAME"): "the network that it takes",
}
REDUCING = re.compile(r"all_?reduce|reduce_?scatter|nccl|gloo|atomic|mpi4py|torch\.distributed|horovod|deepspeed", re.I)


def test_no_collective_and_no_atomic_may_sum_floats() -> None:
    """In-switch reduction differed from call to call: it trades order for speed, and no flag makes it repeat."""
    found = {
        (path.relative_to(ROOT).as_posix(), function, what): line
        for folder in ("kernels", "model", "storage", "tasks", "flows")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for function, what, line in collectives(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found.keys() == INTEGER_SITES.keys() | MOVING_SITES.keys(), found


def collectives(tree: ast.AST, function: str = "<module>") -> Iterator[tuple[str, str, int]]:
    """(innermost function, what, line) of everything named like a collective or an atomic, docstrings apart; not of
    Triton's kernels, whose atomics are read where they are compiled (tests/kernels/nvidia/ptx.py)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        for named in names(node):
            if REDUCING.search(named):
                yield function, named, getattr(node, "lineno", 0)
        yield from collectives(node, inner)


def names(node: ast.AST) -> list[str]:
    """What a node names: imported modules, attributes with what they belong to, calls by a string."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute):
        return [ast.unparse(node)]
    if isinstance(node, ast.Name):
        return [node.id]
    is_name = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
    return [node.value] if is_name else []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "planted",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "def f(x):\n    torch.distributed.reduce(x, 0)",
        "def f(dist, x):\n    dist.all_reduce(x)",
        "def f(dist, x):\n    dist.reduce_scatter_tensor(x, x)",
        "def f(dist, x):\n    getattr(dist, 'all_reduce')(x)",
        "def f(tl, p, x):\n    tl.atomic_add(p, x)",
        "from numba import cuda\ndef f(x):\n    cuda.atomic.add(x, 0, 1.5)",
        "from mpi4py import MPI",
        "def f(comm, x):\n    comm.Allreduce(x)",
        "dist.init_process_group('nccl')",
        "import torch.cuda.nccl",
    ],
)
def test_the_check_sees(planted: str) -> None:
    """Each way to a sum across ranks or threads must be found; words in a docstring are none."""
    assert list(collectives(ast.parse(planted))), planted
    assert not list(collectives(ast.parse('def f(x):\n    """An all_reduce, or atomics."""\n    return x.max()')))
