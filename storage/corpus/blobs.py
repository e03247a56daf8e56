"""Documents that a row only names: blobs of Software Heritage's archive.

A blob's name is the sha1 of its bytes (git's is another: of a header too). The archive's public store serves it under
that name, packed by gzip, and it is kept so:

    <cache>/blobs/<first two digits>/<sha1>

Several are asked for at a time; the rows come in the file's order all the same. What is kept is verified at each use,
and fetched anew if it is damaged. A blob that the store lacks or that differs is an error: if it were skipped, the mix
would depend on the day on which it is made. Whether bytes have an encoding depends on them alone, so that is counted.
"""

import hashlib
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from storage.corpus.archive import BROKEN, inflated
from storage.corpus.download import download_bytes
from storage.corpus.row import Row
from storage.corpus.spec import SoftwareHeritage
from storage.corpus.table import chosen
from storage.errors import InputFault, MissingObject, StorageError

ADDRESS = "https://softwareheritage.s3.amazonaws.com/content/"
AT_ONCE = 16  # requests
MAX_BLOB = 300 << 20  # bytes: the archive takes no larger ones in
_ID = re.compile("[0-9a-f]{40}")
_GZIP = b"\x1f\x8b"

Job = Callable[[], Row]


def blob_rows(name: str, data: bytes, how: SoftwareHeritage, cache: Path) -> Iterator[Row]:
    """All rows of the file `name` with content `data`, each with its blob as the member and its text.

    Raises MissingObject (the store lacks a blob), InputFault (one differs), StorageError (the disk), else VerbatimError
    (no network, a server that fails or refuses).
    """
    over = threading.Event()
    records = enumerate(chosen(name, data, how, how.blob, how.encoding))
    return _in_order((_job(position, record, how, cache, over) for position, record in records), over)


def _job(
    position: int, record: dict[str, Any] | str, how: SoftwareHeritage, cache: Path, over: threading.Event
) -> Row | Job:
    if isinstance(record, str):
        return Row("", position, None, record)
    blob, encoding = (_text(record.get(column)) for column in (how.blob, how.encoding))
    if blob is None or encoding is None or not _ID.fullmatch(blob):
        return Row("", position, None, "malformed")
    return partial(_row, position, blob, encoding, cache, over)


def _text(value: Any) -> str | None:
    """A name as JSON has it, or as the bytes of Parquet."""
    if isinstance(value, bytes) and value.isascii():
        return value.decode()
    return value if isinstance(value, str) and value.isascii() else None


def _in_order(jobs: Iterator[Row | Job], over: threading.Event) -> Iterator[Row]:
    """The rows, and those that the jobs make, in order, while up to twice AT_ONCE jobs are begun or done ahead."""
    ahead: deque[Row | Future[Row]] = deque()
    begun = 0
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for job in jobs:
            ahead.append(job if isinstance(job, Row) else pool.submit(job))
            begun += not isinstance(job, Row)
            while ahead and (isinstance(ahead[0], Row) or begun > 2 * AT_ONCE):
                row = ahead.popleft()
                begun -= not isinstance(row, Row)
                yield row if isinstance(row, Row) else row.result()
        for row in ahead:
            yield row if isinstance(row, Row) else row.result()
    finally:  # an error, or nobody wants the rest
        over.set()
        pool.shutdown(cancel_futures=True)


def _row(position: int, blob: str, encoding: str, cache: Path, over: threading.Event) -> Row:
    content = _blob(blob, cache / "blobs" / blob[:2] / blob, over)
    try:
        return Row(blob, position, content.decode(encoding))
    except UnicodeError:
        return Row(blob, position, None, "undecodable")
    except (LookupError, ValueError):
        return Row(blob, position, None, "unknown encoding")


def _blob(blob: str, path: Path, over: threading.Event) -> bytes:
    try:
        return _unpacked(blob, path.read_bytes())
    except (OSError, InputFault):  # not there, or not as it was kept
        packed = _fetched(blob, over)
    content = _unpacked(blob, packed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{blob}.{os.getpid()}.{threading.get_ident()}")
        part.write_bytes(packed)
        os.replace(part, path)
    except OSError as error:
        raise StorageError(
            f"{blob} could not be stored in {path.parent}: {error.strerror}",
            cause="the disk of the cache folder is full, or has no room for more files, or may not be written",
            next_step="free some space or change the folder's owner, and run the same command again",
        ) from error
    return content


def _fetched(blob: str, over: threading.Event) -> bytes:
    try:
        return download_bytes(f"{ADDRESS}{blob}", MAX_BLOB, over.wait)
    except MissingObject as error:
        raise MissingObject(
            error.message,
            cause="the archive was asked to take it out, or the row names no blob of it",
            next_step=f"leave it out in the recipe, by where: … and blob_id != '{blob}'; that is another mix",
        ) from None


def _unpacked(blob: str, packed: bytes) -> bytes:
    """The blob's bytes; InputFault if they are not those that its name says."""
    try:
        if not packed.startswith(_GZIP):
            raise ValueError(f"not packed by gzip: {len(packed)} bytes")
        content = inflated(packed, f"blob {blob}", MAX_BLOB)
    except BROKEN as error:
        raise InputFault(f"{ADDRESS}{blob} cannot be unpacked: {error}", cause="damaged on its way or there") from error
    found = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    if found != blob:
        raise InputFault(
            f"{ADDRESS}{blob} serves another blob: {len(content)} bytes, sha1 {found}; expected sha1 {blob}",
            cause="damaged on its way or there, or the column names no sha1",
            next_step="run the same command again; what was fetched before is kept",
        )
    return content
