"""What all stores share: which keys are allowed, how an object is digested, what is checked when one is read.

A key is a relative POSIX path of segments `[A-Za-z0-9_-][A-Za-z0-9._-]*`: no absolute path, no "..", and no leading
dot, so that a temporary file (`.tmp-…`) can never be an object.
"""

import re
from collections.abc import Iterable
from typing import Any

from kernels.digest import digest_of, new_hasher
from storage.errors import InputFault, MissingObject, UsageError

MAX_OBJECT = 4 << 30  # bytes; a store from a stranger must not be able to exhaust memory
MAX_KEY = 512
SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")

Keys = list[str]  # named, because a store has a method `list`
# An object's bytes, or pieces of them in order, which are never joined. They can be gone through again, and one that
# raises in the middle leaves no object.
Data = bytes | Iterable[bytes | memoryview]


def pieces(data: Data) -> Iterable[bytes | memoryview]:
    """The pieces of an object that is to be written."""
    return [data] if isinstance(data, bytes) else data


def object_digest(data: Data) -> str:
    """The digest under which an object's bytes are named anywhere in a run: BLAKE3("object", the bytes)."""
    return digest_of(pieces(data), "object")


def object_hasher() -> Any:
    """What gives object_digest() of all bytes that its `update` was called with, by `hexdigest`."""
    return new_hasher("object")


def check_key(key: str) -> Keys:
    """The key's segments; UsageError if it is not a plain relative path."""
    segments = key.split("/")
    if len(key) > MAX_KEY or not all(SEGMENT.match(segment) for segment in segments):
        raise UsageError(
            f"object key {key[:MAX_KEY]!r} is not allowed",
            cause="a key is a relative path of letters, digits, '.', '_' and '-', no segment beginning with a dot",
        )
    return segments


def verified(uri: str, key: str, data: bytes, digest: str | None) -> bytes:
    """`data`, if its digest is `digest` or none is asked for."""
    if digest is not None and (found := object_digest(data)) != digest:
        raise InputFault(
            f"{uri}: {key} has digest {found}, expected {digest}",
            cause="the object was damaged or replaced after it was written",
            next_step="fetch it again from its publisher",
        )
    return data


def missing(uri: str, key: str) -> MissingObject:
    """The error for an object that is not there."""
    return MissingObject(f"{uri}: there is no {key}", cause="another address is meant, or the copy is not complete")


def check_range(uri: str, key: str, size: int, start: int, length: int) -> None:
    """InputFault unless the object of `size` bytes holds that range."""
    if start < 0 or length < 0 or start + length > size:
        raise InputFault(f"{uri}: {key} holds {size} bytes, bytes {start} to {start + length} were asked for")


def check_limit(uri: str, key: str, size: int, limit: int) -> None:
    """InputFault if the object is longer than its reader allows."""
    if size > limit:
        raise InputFault(f"{uri}: {key} holds {size} bytes, at most {limit} are allowed there")
