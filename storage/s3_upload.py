"""Writing one object of an S3 store: by one request, or in parts with one conditional completion at the end.

Both end in Refusal 412 where the object exists already. Whether an answer that was lost stood for a success is not
known here: the store compares.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, TypeVar

from storage.errors import StorageError
from storage.objects import Data, pieces
from storage.s3_requests import Bucket, Refusal

PART = 8 << 20  # bytes of one request at most; S3 allows 10,000 parts of at least 5 MiB

Part = list[memoryview]  # of consecutive bytes
T = TypeVar("T")


def length(data: Data) -> int:
    """How many bytes the object has."""
    return sum(memoryview(piece).nbytes for piece in pieces(data))


def parts(data: Data) -> Iterator[Part]:
    """The object in parts of PART bytes, the last one shorter; each as views of the data, so nothing is copied yet."""
    part: Part = []
    room = PART
    for piece in pieces(data):
        view = memoryview(piece).cast("B")
        while len(view):
            part.append(view[:room])
            room -= len(part[-1])
            view = view[len(part[-1]) :]
            if not room:
                yield part
                part, room = [], PART
    if part:
        yield part


def put(bucket: Bucket, name: str, data: Data) -> None:
    """Create the object by one request."""
    bucket.send("put_object", Key=name, IfNoneMatch="*", **_body(pieces(data)))


def put_in_parts(bucket: Bucket, name: str, data: Data) -> None:
    """Create the object in parts, some at a time; they are given up if that fails."""
    upload = bucket.send("create_multipart_upload", Key=name)["UploadId"]

    def send(number: int, part: Part) -> dict[str, Any]:
        answer = bucket.send("upload_part", Key=name, UploadId=upload, PartNumber=number, **_body(part))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        sent = parallel(bucket, send, enumerate(parts(data), 1))
        whole = {"Parts": sent}
        bucket.send("complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload=whole, IfNoneMatch="*")
    except BaseException:
        with suppress(Refusal, StorageError):
            bucket.send("abort_multipart_upload", Key=name, UploadId=upload)
        raise


def parallel(bucket: Bucket, work: Callable[..., T], arguments: Iterator[Any]) -> list[T]:
    """`work(*each)` for each of the arguments, on the bucket's threads; after a failure none is begun."""
    futures = [bucket.pool.submit(work, *each) for each in arguments]
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


def _body(part: Sequence[bytes | memoryview]) -> dict[str, Any]:
    """The part's bytes and the MD5 by which the server sees that they arrived so."""
    body = b"".join(part)
    return {"Body": body, "ContentMD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
