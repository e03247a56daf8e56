"""Digests of tensors and states: BLAKE3 over leaves of whole rows, in ten lines that anyone can write again.

    leaf          BLAKE3("leaf", canonical little-endian bytes of the smallest number of rows that reaches 64 KiB)
    tensor        BLAKE3("tensor", canonical JSON of {dtype, name, shape}, then the leaves in order)
    state root    BLAKE3("state", canonical JSON of {scalars, tensors: {name: digest}})

A vector or a scalar is one leaf. BLAKE3("x", data) is 32 bytes of BLAKE3's key derivation from `data` with the context
string "verbatim 2026 x". Every digest is so bound to its purpose: no leaf can pass for a tensor and no tensor for a
state.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3

from kernels import canonical

LEAF_BYTES = 64 * 1024
SPAN_LEAVES = 64  # leaves that one thread takes at a time
DTYPES = {"float32": "<f4", "int64": "<i8", "int32": "<i4", "int8": "|i1", "uint16": "<u2", "uint32": "<u4"}


def digest(data: bytes | memoryview, purpose: str) -> str:
    """BLAKE3 of `data` for one purpose, as 64 hex digits."""
    return new_hasher(purpose).update(data).hexdigest()


def digest_of(pieces: Iterable[bytes | memoryview], purpose: str) -> str:
    """digest() of the pieces' bytes in order, without joining them."""
    hasher = new_hasher(purpose)
    for piece in pieces:
        hasher.update(piece)
    return str(hasher.hexdigest())


def leaf_rows(shape: tuple[int, ...], itemsize: int) -> int:
    """How many rows of the first dimension make one leaf: the fewest whose bytes reach 64 KiB."""
    if len(shape) < 2:
        return max(1, shape[0] if shape else 1)
    row_bytes = itemsize * int(np.prod(shape[1:], dtype=np.int64))
    return max(1, -(-LEAF_BYTES // max(1, row_bytes)))


def leaves(array: np.ndarray) -> bytes:
    """The leaf digests of `array`, 32 bytes each, in row order."""
    canonical_array = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name])
    flat = memoryview(canonical_array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    size = _leaf_bytes(array)
    run = SPAN_LEAVES * size
    spans = [flat[start : start + run] for start in range(0, len(flat), run)]
    if len(spans) < 2:
        return b"".join(_span_leaves(span, size) for span in spans)
    return b"".join(_threads(os.getpid()).map(_span_leaves, spans, [size] * len(spans)))


def leaves_of(tensors: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """leaves() of each, by name."""
    return {name: leaves(array) for name, array in tensors.items()}


def _leaf_bytes(array: Any) -> int:
    """The bytes of every leaf but the last, 1 at least."""
    rows = array.shape[0] if array.ndim else 1
    return max(1, leaf_rows(tuple(array.shape), array.itemsize) * (array.nbytes // max(1, rows)))


def _span_leaves(span: memoryview, size: int) -> bytes:
    starts = range(0, len(span), size)
    return b"".join(new_hasher("leaf").update(span[start : start + size]).digest() for start in starts)


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Two: more would wait for the interpreter. Of this process: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(2, "digest")


def tensor_digest(name: str, array: Any, array_leaves: bytes | None = None) -> str:
    """The digest of a named tensor, NumPy's or torch's; pass its leaves where they are known, or made on a device."""
    head = _head(str(array.dtype).removeprefix("torch."), name, tuple(array.shape))
    return digest_of((head, leaves(array) if array_leaves is None else array_leaves), "tensor")


@lru_cache(maxsize=8192)  # the same at every step, and longer to write than most tensors' leaves to hash
def _head(dtype: str, name: str, shape: tuple[int, ...]) -> bytes:
    return canonical.dumps({"dtype": dtype, "name": name, "shape": list(shape)})


def tensor_digests(tensors: Mapping[str, Any], leaves_by_name: Mapping[str, bytes]) -> dict[str, str]:
    """The digest of each named tensor, from its leaves."""
    return {name: tensor_digest(name, tensor, leaves_by_name[name]) for name, tensor in tensors.items()}


def is_zero(array: Any, array_leaves: bytes) -> bool:
    """Whether every bit of a tensor with these leaves is 0, without a look at it."""
    size = _leaf_bytes(array)
    whole, rest = divmod(array.nbytes, size)
    return array_leaves == _zero_leaf(size) * whole + (_zero_leaf(rest) if rest else b"")


@lru_cache(maxsize=256)
def _zero_leaf(size: int) -> bytes:
    return bytes(new_hasher("leaf").update(bytes(size)).digest())


def root(tensors: Mapping[str, str], scalars: Mapping[str, Any]) -> str:
    """The root over tensor digests by name and the scalars beside them."""
    return digest(canonical.dumps({"scalars": dict(scalars), "tensors": dict(tensors)}), "state")


def keyed(key: bytes, chunks: Iterable[bytes | memoryview]) -> str:
    """BLAKE3 of the chunks in order under a 32-byte key, as 64 hex digits: only who holds all the bytes can make it."""
    hasher = blake3(key=key)
    for chunk in chunks:
        hasher.update(chunk)
    return str(hasher.hexdigest())


def new_hasher(purpose: str) -> Any:
    return blake3(derive_key_context=f"verbatim 2026 {purpose}")
