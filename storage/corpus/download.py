"""A file from a web server or an s3 store: a pinned one in a part that is kept and continued, or a small one at once.

    <sha256>.part    what has come so far; the next call asks for the rest
    <sha256>         the whole file, as pinned

What a server says of a file is believed for one purpose: to tell a connection that broke from a file that is another.
Only bytes that have the pinned size and sha256 get their name. A part that, continued, has another digest is fetched
once more as a whole, since its beginning may be an older file's.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

from storage.corpus.remote import Answer, Passing, open_remote
from storage.corpus.spec import Pin
from storage.errors import InputFault, StorageError, VerbatimError

TRIES = 5  # in a row that bring no byte
PAUSE = 1.0  # seconds before the second of them, doubled before each later one
LONGEST = 300.0  # seconds that a server may ask to be left alone, or may take for a small file
PIECE = 1 << 20

Tell = Callable[[int, int], None]  # (bytes that are there, of how many)


def download(url: str, pin: Pin, target: Path, token: str | None = None, tell: Tell = lambda done, total: None) -> None:
    """Fetch the pinned file to `target`, going on with the part that an interrupted call left beside it.

    tell(done, total): the bytes that are there, of pin.size: at the begin, once in a while, and at the end.

    Raises InputFault (the address serves another file: both digests), MissingObject, StorageError (the disk), else
    VerbatimError (no network, a server that fails or refuses). `token` is sent to the address's own host alone.
    """
    part = target.with_name(f"{target.name}.part")
    with storing(url, target.parent), open(part, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another process may be at the same file; then it is there afterwards
        if target.exists():
            return
        _fetch(url, pin, file, token, tell)
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, target)


@contextmanager
def storing(what: str, folder: Path) -> Iterator[None]:
    """Make the folder of the cache; StorageError for what the system cannot do there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise StorageError(
            f"{what} could not be stored in {folder}: {error.strerror or error}",
            cause="the disk of the cache folder is full, or the folder may not be written",
            next_step="free some space or change the folder's owner, and run the same command again",
        ) from error


def _fetch(url: str, pin: Pin, file: BufferedRandom, token: str | None, tell: Tell) -> None:
    for _ in range(2):
        at_once, size = _fill(url, pin, file, token, tell)
        found = _digest(file)
        if (found, size) == (pin.sha256, pin.size):
            return
        file.truncate(0)
        if at_once:
            break
    raise InputFault(
        f"{url} serves another file than pinned: {size} bytes, sha256 {'of its beginning ' if size > pin.size else ''}"
        f"{found}; expected {pin.size} bytes, sha256 {pin.sha256}",
        cause="the file was changed upstream after it was pinned, or damaged on its way",
        next_step="find the pinned file elsewhere, or pin the new one in the recipe: that is another mix",
    )


def _fill(url: str, pin: Pin, file: BufferedRandom, token: str | None, tell: Tell) -> tuple[bool, int]:
    """Append what is missing. Returns whether one answer gave the whole file, and the size that it has there."""
    failures = 0
    while True:
        have = file.seek(0, os.SEEK_END)
        if have and have == pin.size:  # a former call was killed just before it could say so
            tell(have, pin.size)
            return False, have
        try:
            with open_remote(url, have, token) as answer:
                return answer.start == 0, _receive(answer, pin.size, file, tell)
        except Passing as error:
            came = file.seek(0, os.SEEK_END)
            failures = 1 if came > have else failures + 1
            if failures == TRIES:
                raise VerbatimError(
                    f"{url}: {error}, {TRIES} times in a row; {came} of {pin.size} bytes are kept",
                    cause="the network or the server is down",
                    next_step="run the same command again later: it goes on from there",
                ) from error
            time.sleep(_pause(error, failures))


def _pause(error: Passing, failures: int) -> float:
    return min(max(error.wait, PAUSE * 2 ** (failures - 1)), LONGEST)


def download_bytes(url: str, most: int, wait: Callable[[float], object] = time.sleep) -> bytes:
    """A small file in one piece, from its begin at each try. wait(seconds): what it returns ends the tries if true.

    Raises InputFault (it has more than `most` bytes), MissingObject, else VerbatimError (no network, a server that
    fails or refuses).
    """
    failures = 0
    while True:
        try:
            with open_remote(url, 0, None) as answer:
                return _whole(url, answer, most)
        except Passing as error:
            failures += 1
            if failures == TRIES or wait(_pause(error, failures)):
                raise VerbatimError(
                    f"{url}: {error}, {failures} times in a row",
                    cause="the network or the server is down",
                    next_step="run the same command again later: it goes on from there",
                ) from error


def _whole(url: str, answer: Answer, most: int) -> bytes:
    pieces, size, began = [], 0, time.monotonic()
    while piece := answer.read(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise InputFault(
                f"{url} has {size} bytes or more, at most {most} are allowed", cause="no file of that kind"
            )
        if time.monotonic() - began > LONGEST:
            raise VerbatimError(
                f"{url}: {size} bytes came in {LONGEST:.0f} s, and no end",
                cause="the network is slow, or the server holds its answer back",
                next_step="ask another server, or try again later",
            )
    if answer.total not in (None, size):
        raise Passing(f"the connection ended after {size} of {answer.total} bytes")
    return b"".join(pieces)


def _receive(answer: Answer, size: int, file: BufferedRandom, tell: Tell) -> int:
    """Append the answer, no more than `size` bytes in all. Returns the size that the remote file has."""
    if answer.start == 0:
        file.truncate(0)
    elif answer.total not in (None, size):
        return answer.total or 0  # the rest of another file
    at, end = answer.start, size if answer.total is None else min(answer.total, size)
    told = at
    tell(at, size)
    while at < end:
        piece = answer.read(min(PIECE, end - at))
        if not piece and answer.total is None:
            return at
        if not piece:
            raise Passing(f"the connection ended after {at} of {answer.total} bytes")
        file.write(piece)
        at += len(piece)
        if at == end or at - told >= PIECE:  # a piece may be of a few bytes
            tell(told := at, size)
    return at + len(answer.read(1)) if answer.total is None else answer.total


def _digest(file: BufferedRandom) -> str:
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
