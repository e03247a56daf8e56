"""The store: immutable objects under relative keys, each written once by `create`.

    create(key, data) -> True | False    False: the key exists already; nothing was changed
    read(key, digest)                    the whole object, verified when a digest is given
    read_range(key, start, length)       a piece of it
    list(prefix), size(key)              what is there
    delete(key)                          for caches only

An object exists wholly or not at all, whenever the process dies. There is no overwriting: two writers of one key
race by `create`, and exactly one of them is told True.

A key is a relative POSIX path of segments `[A-Za-z0-9_-][A-Za-z0-9._-]*`: no absolute path, no "..", and no leading
dot, so that a temporary file (`.tmp-…`) can never be an object. LocalStore opens folder by folder without following
links: a symbolic link below the root is refused, wherever it points.
"""

import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Protocol
from urllib.parse import unquote, urlparse

from kernels.digest import digest as blake3_digest
from storage.errors import InputFault, MissingObject, StorageError, UsageError

MAX_OBJECT = 4 << 30  # bytes; a store from a stranger must not be able to exhaust memory
MAX_KEY = 512
_SEGMENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")
_WRITE_CHUNK = 64 << 20

Keys = list[str]  # named, because a store has a method `list`


class Store(Protocol):
    """Where a run, a mix or a published release lives."""

    @property
    def uri(self) -> str:
        """The address that `open_store` takes."""

    def create(self, key: str, data: bytes) -> bool:
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


def object_digest(data: bytes) -> str:
    """The digest under which an object's bytes are named anywhere in a run."""
    return blake3_digest(data, "object")


def check_key(key: str) -> Keys:
    """The key's segments; UsageError if it is not a plain relative path."""
    segments = key.split("/")
    if len(key) > MAX_KEY or not all(_SEGMENT.match(segment) for segment in segments):
        raise UsageError(
            f"object key {key[:MAX_KEY]!r} is not allowed",
            cause="a key is a relative path of letters, digits, '.', '_' and '-', no segment beginning with a dot",
        )
    return segments


def open_store(uri: str) -> Store:
    """The store at `uri`: "file:///path", a plain path, or "memory://name" (one per name and process)."""
    parsed = urlparse(uri)
    if parsed.scheme == "memory":
        return MemoryStore(parsed.netloc + parsed.path)
    if parsed.scheme == "file" and parsed.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parsed.path)))
    if "://" in uri or not uri:
        raise UsageError(f"no store for {uri!r}", next_step="use a folder, file:///folder or memory://name")
    return LocalStore(Path(uri))


def create_same(store: Store, key: str, data: bytes) -> bool:
    """`create`, where an existing object with the same bytes is fine (False); InputFault if it has others."""
    if store.create(key, data):
        return True
    if store.size(key) != len(data) or store.read(key) != data:
        raise InputFault(
            f"{store.uri}: {key} exists with other content: digest {object_digest(store.read(key))}, "
            f"expected {object_digest(data)}",
            cause="another run was written here, or the object was changed afterwards",
            next_step="choose an empty folder, or find out who wrote it; nothing was overwritten",
        )
    return False


def verified(uri: str, key: str, data: bytes, digest: str | None) -> bytes:
    """`data`, if its digest is `digest` or none is asked for."""
    if digest is not None and (found := object_digest(data)) != digest:
        raise InputFault(
            f"{uri}: {key} has digest {found}, expected {digest}",
            cause="the object was damaged or replaced after it was written",
            next_step="fetch it again from its publisher",
        )
    return data


def _missing(uri: str, key: str) -> MissingObject:
    return MissingObject(f"{uri}: there is no {key}", cause="another address is meant, or the copy is not complete")


def _check_range(uri: str, key: str, size: int, start: int, length: int) -> None:
    if start < 0 or length < 0 or start + length > size:
        raise InputFault(f"{uri}: {key} holds {size} bytes, bytes {start} to {start + length} were asked for")


def _check_limit(uri: str, key: str, size: int, limit: int) -> None:
    if size > limit:
        raise InputFault(f"{uri}: {key} holds {size} bytes, at most {limit} are allowed there")


class MemoryStore:
    """Objects in this process's memory: for tests and dry runs. Stores of one name share their objects."""

    _all: ClassVar[dict[str, dict[str, bytes]]] = {}
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        with self._lock:
            self._objects = self._all.setdefault(name, {})

    def create(self, key: str, data: bytes) -> bool:
        check_key(key)
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        data = self._get(key)
        _check_limit(self.uri, key, len(data), limit)
        return verified(self.uri, key, data, digest)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        data = self._get(key)
        _check_range(self.uri, key, len(data), start, length)
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
            raise _missing(self.uri, key)
        return data


class LocalStore:
    """Objects as files below one folder of a local file system that has hard links."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.uri = self.root.as_uri()

    def path(self, key: str) -> Path:
        """Where the object lies; for messages and for tools that read files. Not checked for links."""
        return self.root.joinpath(*check_key(key))

    def create(self, key: str, data: bytes) -> bool:
        with self._errors(key), self._folder(key, make=True) as (folder, name):
            if _exists(folder, name):
                os.fsync(folder)  # whoever created it may not have got this far
                return False
            return _link_new(folder, name, data)

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        with self._errors(key), self._file(key) as file:
            size = os.fstat(file).st_size
            _check_limit(self.uri, key, size, limit)
            return verified(self.uri, key, _read_exactly(file, 0, size, self.uri, key), digest)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors(key), self._file(key) as file:
            _check_range(self.uri, key, os.fstat(file).st_size, start, length)
            return _read_exactly(file, start, length, self.uri, key)

    def list(self, prefix: str = "") -> Keys:
        base = prefix.rpartition("/")[0]
        start = self.root.joinpath(*check_key(base)) if base else self.root
        keys = (path.relative_to(self.root).as_posix() for path in _files(start))
        return sorted(key for key in keys if key.startswith(prefix))

    def size(self, key: str) -> int:
        with self._errors(key), self._file(key) as file:
            return os.fstat(file).st_size

    def delete(self, key: str) -> None:
        try:
            with self._errors(key), self._folder(key, make=False) as (folder, name):
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
        except MissingObject:
            return

    @contextmanager
    def _folder(self, key: str, make: bool) -> Iterator[tuple[int, str]]:
        """(descriptor of the folder that holds the key, last segment); makes missing folders durably if asked."""
        *folders, name = check_key(key)
        if make:
            self.root.mkdir(parents=True, exist_ok=True)
        current = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = _open_folder(current, folder, make)
                os.close(current)
                current = inner
            yield current, name
        finally:
            os.close(current)

    @contextmanager
    def _file(self, key: str) -> Iterator[int]:
        """Descriptor of the object, opened for reading; only a regular file is an object."""
        with self._folder(key, make=False) as (folder, name):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InputFault(f"{self.uri}: {key} is not a regular file")
            yield file
        finally:
            os.close(file)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Turn the system's errors into one sentence that says what to do."""
        try:
            yield
        except OSError as error:
            raise _explained(self.uri, key, error) from error


def _explained(uri: str, key: str, error: OSError) -> InputFault | StorageError:
    if error.errno == errno.ENOENT:
        return _missing(uri, key)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return InputFault(f"{uri}: {key} passes through a link or a file where a folder must be; links are refused")
    reasons = {
        errno.ENOSPC: ("the disk is full", "free some space and run the same command again"),
        errno.EDQUOT: ("the disk quota is used up", "free some space and run the same command again"),
        errno.EFBIG: ("the file would be larger than the system's limit", "raise the limit (ulimit -f)"),
        errno.EACCES: ("no permission", "run as the folder's owner, or choose another folder"),
        errno.EPERM: ("not permitted", "choose a folder on a file system with hard links that you may write"),
        errno.EROFS: ("the file system is read-only", "choose another folder"),
    }
    cause, next_step = reasons.get(error.errno or 0, ("", ""))
    return StorageError(
        f"{uri}: {key}: {error.strerror or error}; nothing half-written is left", cause=cause, next_step=next_step
    )


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _open_folder(parent: int, name: str, make: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # another writer made it in between
        os.mkdir(name, dir_fd=parent)
    os.fsync(parent)
    return os.open(name, flags, dir_fd=parent)


def _link_new(folder: int, name: str, data: bytes) -> bool:
    """Write a temporary file, make it durable, link it to `name` unless that exists, make the link durable."""
    temporary = f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    try:
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return False
        return True
    finally:
        os.unlink(temporary, dir_fd=folder)
        os.fsync(folder)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view[:_WRITE_CHUNK]) :]


def _read_exactly(file: int, start: int, length: int, uri: str, key: str) -> bytes:
    pieces = []
    while length:
        piece = os.pread(file, min(length, _WRITE_CHUNK), start)
        if not piece:
            raise InputFault(f"{uri}: {key} became shorter while it was read")
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return b"".join(pieces)


def _files(folder: Path) -> Iterator[Path]:
    """Regular files below `folder` whose path is a valid key; links and temporary files are not followed or shown."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}", cause="no permission to list this folder") from error
    for entry in entries:
        if not _SEGMENT.match(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
