"""A read-through cache of what remote stores hold: files in a folder of this machine, safe to delete at any time.

    <folder>/<ab>/<name>    name: the digest of an object, or <digest>-<start>-<length> for a piece of one

A name says what the bytes must be, not where they came from, so copies of a run share them. Whoever uses an entry
verifies it as if it had just come over the network, and drops it if it is damaged. Nothing here is forced to the disk,
and nothing is an error: what cannot be kept is fetched again.

    VERBATIM_CACHE       the folder; empty: keep nothing. Default: ~/.cache/verbatim
    VERBATIM_CACHE_GB    how much it may hold. Default: 10
"""

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from storage.errors import UsageError

FOLDER, LIMIT_GB = "VERBATIM_CACHE", "VERBATIM_CACHE_GB"
_TEMPORARY = ".tmp-"
_ABANDONED = 3600.0  # seconds after which a file that nobody finished is a killed writer's
_SLACK = 8  # the limit's share that is left free by a look at the folder: room for this many writers until the next
_BETWEEN = 64  # a writer looks again after having written this share of the limit


class Cache:
    """Entries of at most `limit` bytes together; those that were not used for the longest time go first."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._written = limit  # since the last look: a new process looks before it writes

    @classmethod
    def of_user(cls) -> Self | None:
        """The cache that the environment names; None if it wants none. UsageError for a limit that is no number."""
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.expanduser(os.environ.get(FOLDER, f"{home}/verbatim"))
        limit = os.environ.get(LIMIT_GB, "10")
        try:
            size = int(float(limit) * 1e9)
        except (ValueError, OverflowError):
            raise UsageError(f"{LIMIT_GB} is {limit!r}, not a number of gigabytes", next_step="unset it") from None
        if folder.startswith("~"):  # a user that this machine does not know, as in some containers, has no home
            folder = ""
        return cls(Path(folder), size) if folder and size > 0 else None

    def get(self, name: str, size: int) -> bytes | None:
        """The entry, which has `size` bytes and is not verified; None if there is none."""
        try:
            file = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_size == size:
                with suppress(OSError):
                    os.utime(file)  # it was used now
                with os.fdopen(os.dup(file), "rb") as reader:
                    data = reader.read(size)
                if len(data) == size:  # else somebody cut it just now
                    return data
        except OSError:  # a disk that fails
            return None
        finally:
            os.close(file)
        self.drop(name)
        return None

    def put(self, name: str, data: bytes) -> None:
        """Keep an entry, if there is room: it appears whole, or not at all."""
        if len(data) > self._limit // _SLACK:
            return
        self._written += len(data)
        path = self._path(name)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            if self._written > self._limit // _BETWEEN:
                self._trim(len(data))
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:  # a full disk, or a folder that may not be written
            with suppress(OSError):
                temporary.unlink()

    def drop(self, name: str) -> None:
        """Remove an entry, if it is there."""
        with suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _trim(self, coming: int) -> None:
        """Remove what killed writers left, then the entries that are the longest unused, until there is room."""
        self._written = coming
        files = []
        for entry in _files(self._folder):
            with suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if entry.name.startswith(_TEMPORARY) and about.st_mtime < time.time() - _ABANDONED:
                    os.unlink(entry.path)
                else:
                    files.append((about.st_mtime, max(about.st_size, 512 * about.st_blocks), entry.path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self._limit - self._limit // _SLACK:
                break
            with suppress(FileNotFoundError):  # another process was faster
                os.unlink(path)
            total -= size


def _files(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """The files of a cache, which have its names; nothing else that lies in the folder may be removed."""
    with suppress(OSError):
        for inner in os.scandir(folder):
            if re.fullmatch(r"[0-9a-f]{2}", inner.name) and inner.is_dir(follow_symlinks=False):
                names = re.compile(rf"{inner.name}[0-9a-f]{{62}}(-\d+-\d+)?|{re.escape(_TEMPORARY)}[0-9a-f]{{16}}")
                entries = (entry for entry in os.scandir(inner) if names.fullmatch(entry.name))
                yield from (entry for entry in entries if entry.is_file(follow_symlinks=False))
