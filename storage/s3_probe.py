"""Does this store keep what is there? Some servers take If-None-Match and overwrite all the same.

On such a server two writers of one key would both be told that they created it, and a release could be replaced. So
before the first write an object is written, then again by one request and in parts, and both must fail with 412. Its
name begins with a dot, so it is no object of a run, and it is deleted afterwards.

A writer that was killed leaves such an object, or parts of an upload that nobody will complete: what is a day old of
either is removed on this occasion, where the keys allow it.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from storage.errors import Refused, StorageError
from storage.s3_requests import Bucket, Refusal

LEFT_BEHIND = timedelta(days=1)  # no object of a run takes so long to send
_BODY = b"whether If-None-Match is honoured here"


def check_conditional_writes(bucket: Bucket, prefix: str) -> None:
    """Raises Refused if the server overwrites what If-None-Match should have kept; StorageError if it cannot write."""
    key = f"{prefix}.probe-{secrets.token_hex(8)}"
    try:
        _writes(_put, bucket, key)
        overwritten = [write.__name__.strip("_") for write in (_put, _put_in_parts) if _writes(write, bucket, key)]
        _remove_left_behind(bucket, prefix)
    except Refusal as refusal:
        raise bucket.explained(key, refusal) from None
    finally:
        with suppress(Refusal, StorageError):  # who may not delete leaves it, and nobody sees it
            bucket.send("delete_object", Key=key)
    if overwritten:
        raise Refused(
            f"{bucket.uri}: this server overwrites objects that If-None-Match should keep ({', '.join(overwritten)}), "
            "so nothing is written there",
            cause="it has no conditional writes (rclone, JuiceFS), or not for uploads in parts (Ceph before Squid)",
            next_step="use a server that has them, such as AWS, MinIO or SeaweedFS, or publish to a folder",
        )


def _writes(write: Callable[[Bucket, str], None], bucket: Bucket, key: str) -> bool:
    """Whether the write was carried out; a 412 says that it was not."""
    try:
        write(bucket, key)
    except Refusal as refusal:
        if refusal.status != 412:
            raise
        return False
    return True


def _put(bucket: Bucket, key: str) -> None:
    bucket.send("put_object", Key=key, Body=_BODY, IfNoneMatch="*")


def _put_in_parts(bucket: Bucket, key: str) -> None:
    upload = bucket.send("create_multipart_upload", Key=key)["UploadId"]
    try:
        tag = bucket.send("upload_part", Key=key, UploadId=upload, PartNumber=1, Body=_BODY)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        bucket.send("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload=parts, IfNoneMatch="*")
    except Refusal:
        with suppress(Refusal, StorageError):
            bucket.send("abort_multipart_upload", Key=key, UploadId=upload)
        raise


def _remove_left_behind(bucket: Bucket, prefix: str) -> None:
    """By the server's own clock, which dates the probe that was just written."""
    with suppress(Refusal, StorageError, KeyError, TypeError):  # the last two: entries without a date, or a zone
        probes = bucket.send("list_objects_v2", Prefix=f"{prefix}.probe-").get("Contents", [])
        if not probes:  # a listing that is late
            return
        now: datetime = max(probe["LastModified"] for probe in probes)
        for probe in probes:
            if now - probe["LastModified"] > LEFT_BEHIND:
                bucket.send("delete_object", Key=probe["Key"])
        for upload in bucket.send("list_multipart_uploads", Prefix=prefix).get("Uploads", []):
            if now - upload["Initiated"] > LEFT_BEHIND:
                bucket.send("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
