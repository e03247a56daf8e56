"""LocalStore: objects as files. Written to a temporary file, made durable, then linked to their name in one step.

It opens folder by folder without following links: a symbolic link below the root is refused, wherever it points.
"""

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import InputFault, MissingObject, NoPermission, StorageError
from storage.objects import (
    MAX_KEY,
    MAX_OBJECT,
    SEGMENT,
    Data,
    Keys,
    check_key,
    check_limit,
    check_range,
    missing,
    pieces,
    verified,
)

_WRITE_CHUNK = 64 << 20
_TEMPORARY = ".tmp-"


class LocalStore:
    """Objects as files below one folder of a local file system that has hard links."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.uri = self.root.as_uri()
        self._swept: set[str] = set()

    def path(self, key: str) -> Path:
        """Where the object lies; for messages and for tools that read files. Not checked for links."""
        return self.root.joinpath(*check_key(key))

    def create(self, key: str, data: Data) -> bool:
        with self._errors(key), self._folder(key, make=True) as (folder, name):
            if (parent := key.rpartition("/")[0]) not in self._swept:
                _sweep(folder)
                self._swept.add(parent)
            if _exists(folder, name):
                os.fsync(folder)  # whoever created it may not have got this far
                return False
            return _link_new(folder, name, data)

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        with self._errors(key), self._file(key) as file:
            size = os.fstat(file).st_size
            check_limit(self.uri, key, size, limit)
            return verified(self.uri, key, _read_exactly(file, 0, size, self.uri, key), digest)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._errors(key), self._file(key) as file:
            check_range(self.uri, key, os.fstat(file).st_size, start, length)
            return _read_exactly(file, start, length, self.uri, key)

    def list(self, prefix: str = "") -> Keys:
        base = prefix.rpartition("/")[0]
        start = self.root
        for segment in check_key(base) if base else []:
            start = start / segment
            if start.is_symlink():
                return []
        keys = (path.relative_to(self.root).as_posix() for path in _files(start, len(str(self.root)) + 1 + MAX_KEY))
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
        return missing(uri, key)
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
    kind = NoPermission if isinstance(error, PermissionError) else StorageError
    return kind(
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


def _link_new(folder: int, name: str, data: Data) -> bool:
    """Write a temporary file, make it durable, link it to `name` unless that exists, make the link durable."""
    temporary, file = _new_temporary(folder)
    try:
        _write_all(file, data)
        os.fsync(file)
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary, dir_fd=folder)
        os.close(file)
        os.fsync(folder)
    return True


def _new_temporary(folder: int) -> tuple[str, int]:
    """(name, descriptor) of a new file that is locked as long as its writer lives."""
    while True:
        name = f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return name, file
        os.close(file)  # swept away before it was locked


def _sweep(folder: int) -> None:
    """Remove what writers left that were killed: nobody holds the lock of their temporary files."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            with suppress(OSError):
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(file)


def _write_all(file: int, data: Data) -> None:
    for piece in pieces(data):
        view = memoryview(piece)
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


def _files(folder: Path, longest: int) -> Iterator[Path]:
    """Regular files below `folder` whose path is a valid key; links and temporary files are not followed or shown.

    longest: characters of a path beyond which it is no valid key.
    """
    folders = [folder]
    while folders:
        for entry in _entries(folders.pop()):
            if not SEGMENT.match(entry.name) or len(entry.path) > longest:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        return list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise NoPermission(f"{folder}: {error.strerror}", cause="no permission to list this folder") from error
    except OSError as error:
        raise StorageError(f"{folder}: {error.strerror}", cause="the disk or its file system is damaged") from error
