"""Copying objects to a store: in pieces, digested on the way, read back and compared once, several at a time.

    source → READS pieces, fetched ahead → digest → the target's `create` → what it holds, read the same way → digest

However long an object is, this holds a few pieces of PIECE bytes of it, and so does a store while it writes them. An
object that is not what its name or the run demands is found before it is whole, so it never appears in the target.
What is there already is compared, not sent again, so copying can be stopped anywhere and repeated.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, starmap

from storage.ahead import ahead
from storage.audit.contents import check_listed
from storage.errors import InputFault
from storage.objects import object_hasher
from storage.store import Store

PIECE = 8 << 20  # bytes read at a time: a part of an upload to S3, so that no part is put together from two
READS = 4  # pieces of one object that are being read or wait to be taken
LONG = 2  # objects of several pieces at a time
OBJECTS = 8  # objects at a time: short ones take a round trip or two, and little else
ELSEWHERE = "verbatim publish RUN-FOLDER --target ANOTHER-ADDRESS; to this one, with code and run as they were then"
_NAMED_BY_CONTENT = re.compile(r"objects/([0-9a-f]{64})")


@dataclass(frozen=True)
class Source:
    """Where an object is, and the digest that it must have, "" if any will do."""

    store: Store
    key: str
    demanded: str = ""


@dataclass(frozen=True)
class Copy:
    """An object of the target, read back; new: it was not there before."""

    digest: str
    size: int
    new: bool


@dataclass(frozen=True)
class PublishProgress:
    """Reported after each object; bytes and seconds of this call. rate: bytes a second, copied or compared."""

    key: str
    objects: int
    of_objects: int
    bytes: int
    of_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.bytes / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float:
        return (self.of_bytes - self.bytes) / self.rate if self.bytes else 0.0


def copy_all(
    work: Mapping[str, Source], target: Store, report: Callable[[PublishProgress], None] = lambda progress: None
) -> dict[str, Copy]:
    """Copy to each key of `work` in the target what its source holds, and read it back.

    The first is there before any other is begun. Objects are reported in the order in which they are done. The first
    failure ends the others, whose objects are then there wholly or not at all. Raises InputFault where an object is
    not what is demanded, or the target holds other bytes than the source; StorageError.
    """
    began, found, moved = time.monotonic(), dict[str, Copy](), 0
    with _Copier(target) as copier:
        sizes = copier.sizes(work)
        total = sum(sizes.values())
        for key, copy in copier.copies(work, sizes):
            found[key], moved = copy, moved + copy.size
            report(PublishProgress(key, len(found), len(work), moved, total, time.monotonic() - began))
    return {key: found[key] for key in work}


class _Stopped(Exception):
    """Another object failed, so nobody waits for this one."""


class _Copier:
    """The threads that copy to one target. Those that copy wait for those that read, and these for nobody."""

    def __init__(self, target: Store) -> None:
        self._target = target
        self._copying = ThreadPoolExecutor(OBJECTS, thread_name_prefix="copy")
        self._reading = ThreadPoolExecutor(LONG * READS, thread_name_prefix="read")
        self._long = threading.BoundedSemaphore(LONG)
        self._over = threading.Event()

    def __enter__(self) -> "_Copier":
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._copying.shutdown(cancel_futures=True)
        self._reading.shutdown()

    def sizes(self, work: Mapping[str, Source]) -> dict[str, int]:
        """Bytes of each."""
        return dict(zip(work, self._copying.map(lambda source: source.store.size(source.key), work.values())))

    def copies(self, work: Mapping[str, Source], sizes: Mapping[str, int]) -> Iterator[tuple[str, Copy]]:
        """Each that is done; the first before any other is begun."""
        keys = iter(work)
        for key in islice(keys, 1):
            yield key, self._copy(key, work[key], sizes[key])
        begun = {self._copying.submit(self._copy, key, work[key], sizes[key]): key for key in keys}
        for future in as_completed(begun):
            yield begun[future], future.result()

    def _copy(self, key: str, source: Source, size: int) -> Copy:
        """Copy one object unless it is there, read it back, compare."""
        with self._long if size > PIECE else nullcontext():
            pieces = _Pieces(partial(self._read, source.store, source.key, size), partial(_check, key, source))
            new = self._target.create(key, pieces)
            # Where it was there already, its source need not be read if it is known what it must be.
            digest = pieces.digest or _demanded(source) or pieces.all_read()
            if (found := self._found(key, size)) != digest:
                found = self._found(key, size)  # the network may have damaged it
            if found != digest:
                raise _differs(f"{self._target.uri}: {key}", found, digest, new)
        return Copy(digest, size, new)

    def _found(self, key: str, size: int) -> str:
        """The digest of what the target holds; if that is not `size` bytes long, it is not read."""
        if (found := self._target.size(key)) != size:
            return f"of {found} bytes instead of {size}"
        return _Pieces(partial(self._read, self._target, key, size)).all_read()

    def _read(self, store: Store, key: str, size: int) -> Iterator[bytes]:
        """The object in pieces; those of a long one are fetched ahead."""
        ranges = ((key, start, min(PIECE, size - start)) for start in range(0, size, PIECE))
        read, several = store.read_range, size > PIECE
        some = ahead(self._reading, read, ranges, READS) if several else starmap(read, ranges)
        for piece in some:
            if self._over.is_set():
                raise _Stopped
            yield piece


class _Pieces:
    """An object in pieces, read anew each time. digest: of all of them, once they were read and found good."""

    def __init__(self, read: Callable[[], Iterator[bytes]], check: Callable[[str], None] = lambda digest: None) -> None:
        self._read, self._check = read, check
        self.digest = ""

    def __iter__(self) -> Iterator[bytes]:
        hasher = object_hasher()
        for piece in self._read():
            hasher.update(piece)
            yield piece
        digest = str(hasher.hexdigest())
        self._check(digest)  # before whoever writes them knows that this was the last
        self.digest = digest

    def all_read(self) -> str:
        """The digest, without the pieces."""
        for _ in self:
            pass
        return self.digest


def _differs(what: str, found: str, digest: str, new: bool) -> InputFault:
    """The error for an object that is not what was to be copied there."""
    if new:
        return InputFault(
            f"{what} does not read back as it was written: digest {found}, expected {digest}",
            cause="the target's server or disk damages objects",
            next_step=ELSEWHERE,
        )
    return InputFault(
        f"{what} is there already with other content: digest {found}, expected {digest}",
        cause="publishing was begun with other code, another README or another state of the run; or it is damaged",
        next_step=ELSEWHERE,
    )


def _demanded(source: Source) -> str:
    """The digest that the object must have: because the run says so, or its name."""
    named = _NAMED_BY_CONTENT.fullmatch(source.key)
    return source.demanded or (named[1] if named else "")


def _check(key: str, source: Source, digest: str) -> None:
    """InputFault if the object with that digest must not be copied."""
    named = _NAMED_BY_CONTENT.fullmatch(source.key)
    if named and named[1] != digest:
        raise InputFault(
            f"{source.store.uri}: {source.key} has digest {digest}, not the one in its name",
            cause="a part of a checkpoint was damaged after it was written",
            next_step=f"rm {source.key} in the run's folder and the checkpoints that name it; train and publish again",
        )
    check_listed({key: source.demanded}, {key: digest})
