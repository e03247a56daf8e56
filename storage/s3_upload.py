"""Writing one object of an S3 store: by one request, or in parts with one conditional completion at the end.

Both end in Refusal 412 where the object exists already. Whether an answer that was lost stood for a success is not
known here: the store compares. A body that was damaged on the way is refused: its CRC-32 is sent with it, in a header,
since not every server reads a trailer; MD5, which servers also check, takes five times as long.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from storage.ahead import ahead
from storage.errors import StorageError
from storage.objects import Data, pieces
from storage.s3_requests import WORKERS, Bucket, Refusal

PART = 8 << 20  # bytes of one request at most; S3 allows 10,000 parts of at least 5 MiB

Part = list[bytes | memoryview]  # of consecutive bytes


def parts(data: Data) -> Iterator[Part]:
    """The object in parts of PART bytes, the last one shorter; each as views of the data, so nothing is copied yet."""
    part: Part = []
    room = PART
    for piece in pieces(data):
        view = memoryview(piece).cast("B")
        while len(view):
            taken = view[:room]
            whole = isinstance(piece, bytes) and len(taken) == len(piece)
            part.append(piece if whole else taken)  # bytes that are a part are sent without a copy
            room -= len(taken)
            view = view[len(taken) :]
            if not room:
                yield part
                part, room = [], PART
    if part:
        yield part


def put(bucket: Bucket, name: str, part: Part) -> None:
    """Create the object by one request."""
    bucket.send("put_object", Key=name, IfNoneMatch="*", **_body(part))


def put_in_parts(bucket: Bucket, name: str, every: Iterable[Part]) -> bool:
    """Create the object in parts, some at a time; they are given up if that fails.

    True if the server states the checksum of an object of just these parts, which follows from theirs. False says
    nothing: not all servers know it.
    """
    upload = bucket.send("create_multipart_upload", Key=name, ChecksumAlgorithm="CRC32")["UploadId"]

    def send(number: int, part: Part) -> dict[str, Any]:
        body = _body(part)
        answer = bucket.send("upload_part", Key=name, UploadId=upload, PartNumber=number, **body)
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": body["ChecksumCRC32"]}

    try:
        sent = list(ahead(bucket.pool, send, enumerate(every, 1), WORKERS))
        whole = {"Parts": sent}
        answer = bucket.send(
            "complete_multipart_upload", Key=name, UploadId=upload, MultipartUpload=whole, IfNoneMatch="*"
        )
    except BaseException:
        with suppress(Refusal, StorageError):
            bucket.send("abort_multipart_upload", Key=name, UploadId=upload)
        raise
    of_parts = b"".join(base64.b64decode(part["ChecksumCRC32"]) for part in sent)
    return bool(answer.get("ChecksumCRC32") == f"{_crc32(of_parts)}-{len(sent)}")


def _body(part: Part) -> dict[str, Any]:
    """The part's bytes and the checksum by which the server sees that they arrived so."""
    body = b"".join(part)
    return {"Body": body, "ChecksumCRC32": _crc32(body)}


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
