"""S3Store: objects in a bucket of an S3 server, written with If-None-Match, read in ranges.

    s3://bucket/prefix    keys, region and server from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
                          AWS_REGION, AWS_ENDPOINT_URL_S3) or from ~/.aws/; without keys, what is public can be read

Nothing is cached, no listing either. An object longer than PART is sent in parts, a few at a time, and appears by one
conditional completion. Before `create` says that it is there, the server's checksum of it is that of these parts, or it
is read back and compared. A write that was cut off leaves no object; parts of an upload that was killed are the
bucket's to remove (a lifecycle rule for such uploads).

SeaweedFS' conditional completion is not atomic: of two uploads for one new object that end at one moment it may carry
out both, and tell both that they created it. The last one's bytes stay, and no later writer gets through. So what
claims something must be short enough for one request, PART: a ledger's header, which a publisher writes before any
other object, its parts, leases. Long objects are named by their content or follow from that header and the code, and
whoever publishes reads each back. Only a RELEASE.json longer than PART, that of a run of some 25,000 steps, has no such
fence: two publishers of one run with different records of audits may both be told, at one moment, that theirs is it.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any, Self, TypeVar

from storage.ahead import ahead
from storage.errors import InputFault, MissingObject, StorageError, UsageError
from storage.objects import (
    MAX_KEY,
    MAX_OBJECT,
    SEGMENT,
    Data,
    Keys,
    check_key,
    check_limit,
    check_range,
    object_digest,
    verified,
)
from storage.s3_probe import check_conditional_writes
from storage.s3_requests import WORKERS, Bucket, NoAnswer, Piece, Refusal
from storage.s3_upload import PART, Part, parts, put, put_in_parts

MAX_PAGES = 10_000  # of a listing, each of up to 1,000 objects: a hundred times the longest run's

T = TypeVar("T")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PLAIN = re.compile(r"s3:/*[A-Za-z0-9/._-]{0,600}")  # any other address may hold a password: it is not repeated


class S3Store:
    """Objects below one prefix of one bucket."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self.uri = f"s3://{bucket}/{prefix}" if prefix else f"s3://{bucket}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._bucket = Bucket(bucket, self.uri)
        self._keeps = False  # whether it was seen that the server heeds If-None-Match

    @classmethod
    def open(cls, uri: str) -> Self:
        """The store at s3://bucket or s3://bucket/prefix; UsageError for any other address. Nothing is sent yet."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        prefix = prefix.rstrip("/")
        if not (uri.startswith("s3://") and _BUCKET.fullmatch(bucket) and (not prefix or _is_key(prefix))):
            raise UsageError(
                f"{uri if _PLAIN.fullmatch(uri) else 's3://…'} is no address of an s3 store",
                cause="an address is s3://bucket or s3://bucket/prefix, without keys, ports or queries",
                next_step="name the server by AWS_ENDPOINT_URL_S3, keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )
        return cls(bucket, prefix)

    def create(self, key: str, data: Data) -> bool:
        check_key(key)
        if not self._keeps:
            check_conditional_writes(self._bucket, self._prefix)
            self._keeps = True
        every = parts(data)
        begin = list(islice(every, 2))
        if len(begin) < 2:
            return self._created(key, data, lambda: put(self._bucket, self._prefix + key, begin[0] if begin else []))
        with suppress(MissingObject):
            self.size(key)
            return False  # before anything was sent
        return self._created(key, data, lambda: self._put_in_parts(key, data, chain(begin, every)))

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        data = self._whole(key, limit)
        if digest is None or object_digest(data) == digest:
            return data
        return verified(self.uri, key, self._whole(key, limit), digest)  # it may have been damaged on the way

    def read_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0 or length <= 0:
            check_range(self.uri, key, self.size(key), start, length)
            return b""
        first = self._piece(key, start, min(length, PART))
        check_range(self.uri, key, first.total, start, length)
        return self._with_rest(key, first, start, length)

    def list(self, prefix: str = "") -> Keys:
        found: set[str] = set()
        page: dict[str, Any] = {"Prefix": self._prefix + prefix}
        for _ in range(MAX_PAGES):
            answer = self._send("list_objects_v2", prefix, **page)
            found.update(entry["Key"].removeprefix(self._prefix) for entry in answer.get("Contents", []))
            if not answer.get("IsTruncated"):
                return sorted(key for key in found if _is_key(key))
            if (after := answer.get("NextContinuationToken")) in (None, page.get("ContinuationToken")):
                break
            page["ContinuationToken"] = after
        raise StorageError(
            f"{self.uri}: the server lists objects below {prefix!r} without end: {len(found):,} so far",
            cause="a broken or hostile server, or the address of far more than a run",
            next_step="check the address",
        )

    def size(self, key: str) -> int:
        check_key(key)
        try:
            return int(self._bucket.send("head_object", Key=self._prefix + key)["ContentLength"])
        except Refusal as refusal:
            if refusal.status != 404:
                raise self._bucket.explained(key, refusal) from None
        return self._piece(key, 0, 1).total  # raises; unlike a HEAD's answer, this one says whether there is a bucket

    def delete(self, key: str) -> None:
        check_key(key)
        with suppress(MissingObject):
            self._send("delete_object", key, Key=self._prefix + key)

    def _send(self, operation: str, key: str, **arguments: Any) -> dict[str, Any]:
        try:
            return self._bucket.send(operation, **arguments)
        except Refusal as refusal:
            raise self._bucket.explained(key, refusal) from None

    def _put_in_parts(self, key: str, data: Data, every: Iterable[Part]) -> None:
        if not put_in_parts(self._bucket, self._prefix + key, every) and not self._holds(key, data):
            raise StorageError(
                f"{self.uri}: {key} does not read back as it was written",
                cause="the server or the network damages objects",
                next_step="delete this object and run the same command again",
            )

    def _created(self, key: str, data: Data, write: Callable[[], None]) -> bool:
        """Write it; True if this call created it. Where an answer was lost, an object that is these bytes is ours."""
        try:
            write()
            return True
        except Refusal as refusal:
            if refusal.status == 412 and not refusal.unsure:
                return False
            lost = self._bucket.explained(key, refusal)
            done = refusal.unsure and refusal.status in (404, 412)  # 404: an upload that is complete is forgotten
        except NoAnswer as no_answer:
            lost, done = no_answer, no_answer.unsure
        if done:
            with suppress(MissingObject):
                return self._holds(key, data)
        raise lost from None

    def _holds(self, key: str, data: Data) -> bool:
        """Whether the object is these bytes, read and compared part by part; MissingObject if there is none."""
        size, expected = self.size(key), parts(data)
        for found in self._pieces(lambda at: self._piece(key, at, min(PART, size - at)).data, range(0, size, PART)):
            if b"".join(next(expected, [])) != found:
                return False
        return next(expected, None) is None

    def _whole(self, key: str, limit: int) -> bytes:
        first = self._piece(key, 0, min(PART, limit + 1))
        check_limit(self.uri, key, first.total, limit)
        return self._with_rest(key, first, 0, first.total)

    def _with_rest(self, key: str, first: Piece, start: int, length: int) -> bytes:
        """`length` bytes from `start`: those that were read already, and the rest, each piece of the same object."""
        if len(first.data) == length:
            return first.data
        buffer = io.BytesIO()  # it becomes the answer without a copy
        buffer.seek(length - 1)
        buffer.write(b"\0")

        def fill(at: int) -> None:
            piece = self._piece(key, start + at, min(PART, length - at))
            if (piece.total, piece.tag) != (first.total, first.tag):
                raise InputFault(f"{self.uri}: {key} was replaced while it was read", cause="its owner overwrites it")
            view[at : at + len(piece.data)] = piece.data

        with buffer.getbuffer() as view:
            view[: len(first.data)] = first.data
            for _ in self._pieces(fill, range(len(first.data), length, PART)):
                pass
        return buffer.getvalue()

    def _pieces(self, read: Callable[[int], T], starts: Iterable[int]) -> Iterator[T]:
        """`read` of each of them, in order, several at a time."""
        return ahead(self._bucket.pool, read, ((at,) for at in starts), WORKERS)

    def _piece(self, key: str, start: int, length: int) -> Piece:
        """At most `length` > 0 bytes from `start`, fewer only where the object ends."""
        check_key(key)
        try:
            return self._bucket.get(self._prefix + key, start, length)
        except Refusal as refusal:
            if refusal.status != 416:
                raise self._bucket.explained(key, refusal) from None
        size = self.size(key)
        check_range(self.uri, key, size, start, length if size else start)  # of an empty object 0 bytes can be read
        if size:
            raise InputFault(
                f"{self.uri}: {key} holds {size} bytes, but the server denies bytes {start} to {start + length}",
                cause="it was replaced while it was read, or a broken server",
            )
        return Piece(b"", 0, "")


def _is_key(text: str) -> bool:
    return len(text) <= MAX_KEY and all(SEGMENT.match(segment) for segment in text.split("/"))
