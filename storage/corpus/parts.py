"""Finished pieces of a preparation, in a folder of this machine or of a cluster; taken up again only if they are whole.

    <name>.arrow    a table, if the piece has one
    <name>.json     {made_from, table: digest or null, about}: written after it

A piece comes to its name in one step. It is not forced to the disk: what a crash of the machine leaves damaged has
another digest, and is made again.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from blake3 import blake3

from kernels import canonical
from storage.errors import MachineFault, Refused, StorageError

_TEMPORARY = ".tmp-"
_LOCK = "lock"


@dataclass(frozen=True)
class Parts:
    """Pieces in `folder`; `made_from` digests all that decides them: another value, and none of them is known here."""

    folder: Path
    made_from: str

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """For the one process that directs a preparation; Refused while another does. Sweeps what was begun."""
        with _told(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with _told(self.folder):
                if not _locked(lock):
                    raise Refused(
                        f"another process is preparing this mix in {self.folder}, or has just finished it",
                        next_step="wait for it, or stop it, and run the same command again",
                    )
                for left in self.folder.rglob(f"{_TEMPORARY}*"):
                    left.unlink(missing_ok=True)
            yield
        finally:
            os.close(lock)

    def remove(self) -> None:
        """Delete the folder: the mix that was made of it is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name: str, about: dict[str, Any], table: Iterable[pa.RecordBatch] = (), *further: str) -> None:
        """Finish a piece: its table, if there are batches, then its record. `further`: what else it was made from."""
        digest = self._write_table(name, table)
        record = {"made_from": [self.made_from, *further], "table": digest, "about": about}
        with _told(self.folder), self._new(self.folder / f"{name}.json") as temporary:
            temporary.write_bytes(canonical.dumps(record))

    def finished(self, name: str, *further: str) -> bool:
        """Whether the piece is here, whole, and made from the same."""
        record = self._record(name)
        if record is None or record.get("made_from") != [self.made_from, *further] or "about" not in record:
            return False
        path = self._table(name)
        digest = record.get("table")
        return digest is None or (path.exists() and _digest(path) == digest)

    def about(self, name: str) -> dict[str, Any]:
        """What `write` was told of a finished piece."""
        return dict(self._finished(name)["about"])

    def digest(self, name: str) -> str:
        """The digest of a finished piece's table."""
        return str(self._finished(name)["table"])

    def table(self, name: str) -> pa.Table:
        """The table of a finished piece, mapped into memory: only what is touched is read."""
        try:
            with pa.memory_map(str(self._table(name))) as file, pa.ipc.open_file(file) as reader:
                return reader.read_all()
        except (OSError, pa.ArrowException) as error:
            raise MachineFault(
                f"{self._table(name)} cannot be read: {error}",
                cause="the folder is being deleted or changed, or the disk fails",
                next_step="run the same command again: what is damaged is made anew",
            ) from error

    def _finished(self, name: str) -> dict[str, Any]:
        record = self._record(name)
        if record is None:
            raise MachineFault(f"{self.folder}: {name} is gone", cause="someone deletes the folder while it is in use")
        return record

    def _record(self, name: str) -> dict[str, Any] | None:
        try:
            record = canonical.loads((self.folder / f"{name}.json").read_bytes())
        except (OSError, canonical.NotCanonical):
            return None
        return record if isinstance(record, dict) else None

    def _table(self, name: str) -> Path:
        return self.folder / f"{name}.arrow"

    def _write_table(self, name: str, batches: Iterable[pa.RecordBatch]) -> str | None:
        every = iter(batches)
        first = next(every, None)
        if first is None:
            return None
        with _told(self.folder), self._new(self._table(name)) as temporary:
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, first.schema) as writer:
                writer.write_batch(first)
                for batch in every:
                    writer.write_batch(batch)
            return _digest(temporary)

    @contextmanager
    def _new(self, path: Path) -> Iterator[Path]:
        """A temporary name for a file that is `path` once the block has ended well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()


def _locked(file: int) -> bool:
    """Lock an open file; False if another process has it locked, or has removed it since it was opened."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(file).st_nlink > 0


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder}: {error.strerror or error}; what is finished there is kept",
            cause="the disk is full, or the folder may not be written",
            next_step="free some space (a preparation needs about twice its text) and run the same command again",
        ) from error


def _digest(path: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    if path.stat().st_size:
        hasher.update_mmap(path)
    return hasher.hexdigest()
