"""Tensor digests, written again from the description: whatever the size, the layout in memory and the threads."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from blake3 import blake3

from kernels import digest


def again(name: str, array: np.ndarray) -> str:
    """The digest of a float32 tensor, one leaf after the other."""
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(1, -1)
    count = -(-65536 // (4 * rows.shape[1])) if array.ndim > 1 else 1
    head = {"dtype": "float32", "name": name, "shape": list(array.shape)}
    total = blake3(derive_key_context="verbatim 2026 tensor")
    total.update(json.dumps(head, sort_keys=True, separators=(",", ":")).encode())
    for first in range(0, len(rows), count):
        leaf = blake3(derive_key_context="verbatim 2026 leaf").update(rows[first : first + count].tobytes())
        total.update(leaf.digest())
    return str(total.hexdigest())


@pytest.mark.parametrize(
    "shape", [(1,), (70000,), (3, 5), (1, 20000), (700, 100), (16385, 17), (9000, 511), (2, 2000000)]
)
def test_a_tensor_s_digest(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    assert digest.tensor_digest("x", array) == again("x", array)
    assert digest.tensor_digest("x", np.asfortranarray(array)) == again("x", array)
    changed = array.copy()
    changed.reshape(-1)[-1] += 1
    assert digest.tensor_digest("x", changed) == again("x", changed) != again("x", array)


def test_a_fork_has_threads_of_its_own() -> None:
    array = np.ones((9000, 511), np.float32)
    expected = digest.tensor_digest("x", array)
    child = os.fork()
    if child == 0:
        os._exit(0 if digest.tensor_digest("x", array) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("shape", [(), (5,), (0,), (0, 3), (2, 3), (700, 100), (16385, 17)])
@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_zeros_are_known_by_their_leaves(shape: tuple[int, ...], kind: str) -> None:
    array = np.zeros(shape, kind)
    assert digest.is_zero(array, digest.leaves(array))
    for place in {0, array.size - 1} if array.size else ():
        array.reshape(-1)[place] = -1
        assert not digest.is_zero(array, digest.leaves(array))
        array.reshape(-1)[place] = 0


def test_a_head_is_of_its_own_name_type_and_shape() -> None:
    arrays = [np.zeros(6, "f4"), np.zeros((2, 3), "f4"), np.zeros(3, "i8")]  # of the same bytes
    digests = {digest.tensor_digest(name, array) for name in "xy" for array in arrays for _ in range(2)}
    assert len(digests) == 6
