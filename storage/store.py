"""The store: immutable objects under relative keys, each written once by `create`.

    create(key, data) -> True | False    False: the key exists already; nothing was changed. data: bytes, or pieces
    read(key, digest)                    the whole object, verified when a digest is given
    read_range(key, start, length)       a piece of it
    list(prefix), size(key)              what is there
    delete(key)                          for caches only

An object exists wholly or not at all, whenever the process dies. There is no overwriting: two writers of one key
race by `create`, and exactly one of them is told True.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol, TypeVar, runtime_checkable
from urllib.parse import unquote, urlparse

from storage.errors import InputFault, MissingObject, UsageError, without_secrets
from storage.local import LocalStore
from storage.objects import (
    MAX_OBJECT,
    Data,
    Keys,
    check_key,
    check_limit,
    check_range,
    missing,
    object_digest,
    pieces,
    verified,
)
from storage.s3 import S3Store

__all__ = [
    "Copies",
    "LocalStore",
    "MemoryStore",
    "Readable",
    "S3Store",
    "Store",
    "create_same",
    "object_digest",
    "open_store",
    "sound",
]

T = TypeVar("T")


class Readable(Protocol):
    """What records are read from: a store, or what is seen of one."""

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        """As a store's."""

    def list(self, prefix: str = "") -> Keys:
        """As a store's."""


class Store(Protocol):
    """Where a run, a mix or a published release lives."""

    @property
    def uri(self) -> str:
        """The address that `open_store` takes."""

    def create(self, key: str, data: Data) -> bool:
        """Write `data` under `key` durably; True if this call created it, False if the key exists already."""

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        """The whole object. InputFault if it is longer than `limit` bytes or has another digest."""

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`; InputFault if the object ends before."""

    def list(self, prefix: str = "") -> Keys:
        """All keys that begin with `prefix`, sorted by code point."""

    def size(self, key: str) -> int:
        """Length of the object in bytes; MissingObject if there is none."""

    def delete(self, key: str) -> None:
        """Remove an object of a cache; no error if there is none."""


@runtime_checkable
class Copies(Protocol):
    """A store whose objects lie in several places (mirrors.py)."""

    def sound(self, key: str, fetch: Callable[[Store], T]) -> T:
        """What sound() says."""


def sound(store: Store, key: str, fetch: Callable[[Store], T]) -> T:
    """`fetch(store)`, which reads, checks, and raises InputFault for what is wrong.

    Where there are several copies, it is given one after the other until it finds nothing wrong. key: the object that
    is then reported, unless the fault names another.
    """
    if isinstance(store, Copies):
        return store.sound(key, fetch)
    try:
        return fetch(store)
    except InputFault as fault:
        if not isinstance(store, S3Store) or isinstance(fault, MissingObject):
            raise
    return fetch(store)  # it may have been damaged on the way


def open_store(uri: str) -> Store:
    """The store at `uri`: "file:///path", a plain path, "s3://bucket/prefix", or one of this process, "memory://name"."""
    if uri.startswith("s3:"):
        return S3Store.open(uri)
    try:
        parsed = urlparse(uri)
        if "\0" in unquote(uri):
            raise ValueError("a NUL character")
    except ValueError as error:
        shown = without_secrets(uri)
        raise UsageError(f"{shown!r} is no address: {error}", next_step="use a folder or file:///folder") from None
    if parsed.scheme == "memory":
        return MemoryStore(parsed.netloc + parsed.path)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parsed.path)))
    if "://" in uri or not uri:
        raise UsageError(
            f"no store for {without_secrets(uri)!r}",
            next_step="use a folder, file:///folder, s3://bucket/prefix or memory://name",
        )
    return LocalStore(Path(uri))


def create_same(store: Store, key: str, data: Data) -> bool:
    """`create`, where an existing object with the same bytes is fine (False); InputFault if it has others."""
    if store.create(key, data):
        return True
    if not _holds(store, key, data):
        raise InputFault(
            f"{store.uri}: {key} exists with other content: digest {object_digest(store.read(key))}, "
            f"expected {object_digest(data)}",
            cause="another run was written here, or the object was changed afterwards",
            next_step="choose an empty folder, or find out who wrote it; nothing was overwritten",
        )
    return False


def _holds(store: Store, key: str, data: Data) -> bool:
    """Whether the object is these bytes; compared piece by piece."""
    start = 0
    if store.size(key) != sum(len(piece) for piece in pieces(data)):
        return False
    for piece in pieces(data):
        if store.read_range(key, start, len(piece)) != piece:
            return False
        start += len(piece)
    return True


class MemoryStore:
    """Objects in this process's memory: for tests and dry runs. Stores of one name share their objects."""

    _all: ClassVar[dict[str, dict[str, bytes]]] = {}
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        with self._lock:
            self._objects = self._all.setdefault(name, {})

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"{self.uri} is in the memory of one process; another would write to a copy",
            next_step="use a folder, or one process",
        )

    def create(self, key: str, data: Data) -> bool:
        check_key(key)
        whole = b"".join(pieces(data))  # before the lock, which their store may need
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = whole
            return True

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        data = self._get(key)
        check_limit(self.uri, key, len(data), limit)
        return verified(self.uri, key, data, digest)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._get(key)
        check_range(self.uri, key, len(data), start, length)
        return data[start : start + length]

    def list(self, prefix: str = "") -> Keys:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def size(self, key: str) -> int:
        return len(self._get(key))

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _get(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            data = self._objects.get(key)
        if data is None:
            raise missing(self.uri, key)
        return data
