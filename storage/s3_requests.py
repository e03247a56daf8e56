"""Requests to one bucket, by botocore: sent, sent again where the answer was lost, judged by HTTP status, explained.

An attempt ends in one of three ways: with an answer; with a refusal, which the caller judges by its HTTP status; or
with nothing to rely on (no connection, an answer cut off or late, 5xx, a body that arrived damaged). Then the same
request is sent again, later each time. What the lost attempt did is not known: `unsure` tells that there was one.
All attempts together have TOTAL seconds, however the server spends them: the time-outs of sockets begin anew with each
byte, so one that sends a byte now and then would never end.

No exception of botocore's leaves this file, because one may quote headers and addresses: messages hold the HTTP status,
the server's error code and the exception's class, and nothing is chained.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from storage.errors import StorageError, VerbatimError
from storage.objects import missing

PAUSES = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0)  # seconds before each further attempt, at most
CONNECT, SILENCE = 10, 30  # seconds until a connection stands, and between two pieces of an answer
TOTAL = 600.0  # seconds for a request with all its attempts: 8 MiB, the most that one moves, in 14 KB/s
WORKERS = 8  # requests of one process at a time
_AGAIN = {408, 429, 500, 502, 503, 504}  # botocore turns a 200 with an error body into 500
_AGAIN_CODES = {
    *("BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"),  # damaged or cut on the way there
    *("ConditionalRequestConflict", "OperationAborted", "SlowDown", "InternalError"),
}
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

T = TypeVar("T")


class Refusal(Exception):
    """The server said no. unsure: an attempt before it may have been carried out."""

    def __init__(self, status: int, code: str, unsure: bool) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code, self.unsure = status, code, unsure


@dataclass(frozen=True)
class Piece:
    """Bytes of an object; total: how many it has; tag: what the server calls this content."""

    data: bytes
    total: int
    tag: str


@dataclass(frozen=True)
class _Failed:
    status: int  # 0: there was no answer
    code: str
    again: bool
    sent: bool = True


class NoAnswer(StorageError):
    """No attempt got an answer. unsure: one of them may have been carried out."""

    def __init__(self, uri: str, last: _Failed, attempts: int, unsure: bool) -> None:
        status = f"HTTP status {last.status}, " if last.status else ""
        super().__init__(
            f"{uri}: {status}{last.code}, after {attempts} attempt{'s' * (attempts > 1)}",
            cause="the server is overloaded or broken"
            if status
            else "the network is down or too slow, or AWS_ENDPOINT_URL_S3 is wrong",
            next_step="run the same command again later; what was written stays",
        )
        self.unsure = unsure


class Bucket:
    """One bucket, with the keys and the server that the environment or the AWS configuration files name."""

    def __init__(self, name: str, uri: str) -> None:
        self.name, self.uri = name, uri
        self._made: tuple[int, Any, ThreadPoolExecutor] | None = None
        self._anonymous = False

    def send(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request and its answer. Raises Refusal, NoAnswer."""
        method = getattr(self.client, operation)

        def attempt() -> dict[str, Any]:
            answer: dict[str, Any] = method(Bucket=self.name, **arguments)
            if not _complete(operation, answer):
                raise _Damaged("an answer that lacks what it is for")
            return answer

        return self._patiently(attempt)

    def get(self, key: str, start: int, length: int) -> Piece:
        """At most `length` > 0 bytes from `start`, fewer only where the object ends. Raises Refusal, NoAnswer."""
        return self._patiently(lambda: self._get(key, start, length))

    def explained(self, key: str, refusal: Refusal) -> VerbatimError:
        """The error that tells a person what the server refused."""
        if refusal.code == "NoSuchBucket":
            return StorageError(
                f"{self.uri}: there is no bucket {self.name}",
                cause="a slip in the address, or another server is meant",
                next_step="make the bucket, or set AWS_ENDPOINT_URL_S3 to the right server",
            )
        if refusal.status == 404 and refusal.code not in _REASONS:
            return missing(self.uri, key)
        cause, next_step = _REASONS.get(refusal.code) or _REASONS.get(str(refusal.status), ("", ""))
        if refusal.status == 403 and self._anonymous:
            cause, next_step = "no keys were found, so none were sent", _SET_KEYS
        said = f"the server answered {refusal}" if refusal.status else refusal.code
        return StorageError(f"{self.uri}: {key}: {said}", cause=cause, next_step=next_step)

    @property
    def client(self) -> Any:
        return self._own()[1]

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that send a large object's parts; its tasks must not wait for other tasks of it."""
        return self._own()[2]

    def _own(self) -> tuple[int, Any, ThreadPoolExecutor]:
        """This process's own client and threads: neither survives a fork."""
        if self._made is None or self._made[0] != os.getpid():
            client, self._anonymous = _client(self.uri)
            self._made = os.getpid(), client, ThreadPoolExecutor(WORKERS, thread_name_prefix="s3")
        return self._made

    def _patiently(self, action: Callable[[], T]) -> T:
        unsure, end = False, time.monotonic() + TOTAL
        for attempt, pause in enumerate((*PAUSES, TOTAL), 1):
            outcome = _within(end - time.monotonic(), lambda: _attempt(action))
            if not isinstance(outcome, _Failed):
                return outcome
            if not outcome.again:
                raise Refusal(outcome.status, outcome.code, unsure)
            unsure |= outcome.sent
            lost = NoAnswer(self.uri, outcome, attempt, unsure)
            if time.monotonic() + pause >= end:
                break
            time.sleep(pause * random.uniform(0.5, 1))
        raise lost

    def _get(self, key: str, start: int, length: int) -> Piece:
        asked = f"bytes={start}-{start + length - 1}"
        answer = self.client.get_object(Bucket=self.name, Key=key, Range=asked)
        try:
            size, total = answer.get("ContentLength", -1), _total(answer, start)
            if total is None or size != min(length, total - start):
                raise _Damaged(f"{size} bytes of {total} in answer to {asked}")
            data = answer["Body"].read()
        finally:
            answer["Body"].close()
        if len(data) != size:
            raise _Damaged("a body that was cut off")
        return Piece(data, total, answer.get("ETag", ""))


class _Damaged(Exception):
    """An answer that is not one to what was asked."""


_USED = {"create_multipart_upload": "UploadId", "upload_part": "ETag"}  # of an answer, beside its status


def _complete(operation: str, answer: dict[str, Any]) -> bool:
    """Whether the answer has what is used of it: a proxy's own page, say, is an empty listing to botocore."""
    if operation == "list_objects_v2":
        return "Name" in answer and all(isinstance(entry.get("Key"), str) for entry in answer.get("Contents", []))
    if operation == "head_object":
        return int(answer.get("ContentLength", -1)) >= 0
    return bool(answer.get(_USED.get(operation, "ResponseMetadata")))


def _total(answer: dict[str, Any], start: int) -> int | None:
    """How many bytes the object has; None if the answer does not begin at `start`."""
    if "ContentRange" not in answer:  # the whole object, from a server that does not know ranges
        return int(answer.get("ContentLength", 0)) if start == 0 else None
    found = _RANGE.fullmatch(answer["ContentRange"])
    return int(found[3]) if found and int(found[1]) == start else None


def _attempt(action: Callable[[], T]) -> T | _Failed:
    """The action's result, or how it failed. Errors end here, so that none is another's context."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError

    try:
        return action()
    except exceptions.ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code", ""))[:100]
        return _Failed(status, code, status in _AGAIN or code in _AGAIN_CODES)
    except (exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError) as error:
        return _Failed(0, type(error).__name__, again=True, sent=False)
    except (exceptions.SSLError, exceptions.ParamValidationError) as error:
        return _Failed(0, type(error).__name__, again=False)
    except (exceptions.HTTPClientError, exceptions.IncompleteReadError, ResponseParserError) as error:
        return _Failed(0, type(error).__name__, again=True)
    except _Damaged as error:
        return _Failed(0, str(error), again=True)
    except exceptions.BotoCoreError as error:  # no keys, an address that is none, a broken configuration file
        return _Failed(0, type(error).__name__, again=False)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return _Failed(0, f"an answer that cannot be read: {type(error).__name__}", again=True)  # a date that is none


def _within(seconds: float, attempt: Callable[[], T | _Failed]) -> T | _Failed:
    """What the attempt came to. One that takes longer has failed: its thread goes on until its connection ends, for
    nobody, and keeps no process alive."""
    done: Future[T | _Failed] = Future()

    def work() -> None:
        try:
            done.set_result(attempt())
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            done.set_exception(error)

    threading.Thread(target=work, name="s3 request", daemon=True).start()
    wait([done], seconds)
    if not done.done():
        return _Failed(0, f"no whole answer within {TOTAL:.0f} seconds", again=True)
    return done.result()


_SET_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws/credentials"
_REASONS = {
    "InvalidAccessKeyId": ("the key id is another server's, or was withdrawn", _SET_KEYS),
    "SignatureDoesNotMatch": ("the secret key does not belong to the key id", _SET_KEYS),
    "ExpiredToken": ("the keys were valid for a time that is over", _SET_KEYS),
    "RequestTimeTooSkewed": ("this machine's clock is wrong", "set the clock"),
    "AuthorizationHeaderMalformed": ("the bucket lies in another region", "set AWS_REGION"),
    "NoSuchUpload": ("another process, or a rule of the bucket, gave this upload up", "run the same command again"),
    "301": ("the bucket lies in another region", "set AWS_REGION"),
    "403": ("these keys may not do this here; or they may not list, and there is no such object", "ask who owns it"),
    "0": ("a configuration that botocore cannot use, or a certificate that does not hold", "see AWS_* and ~/.aws/"),
}


def _client(uri: str) -> tuple[Any, bool]:
    """(a client, whether it has no keys: then it reads what is public)."""
    try:
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError:
        raise VerbatimError(
            f"{uri} needs botocore", cause="it is not installed", next_step="pip install 'verbatim-audit-training[s3]'"
        ) from None
    # Below this level botocore logs the headers of every request, a session's token among them.
    logging.getLogger("botocore").setLevel(max(logging.INFO, logging.getLogger("botocore").level))
    failed = ""
    try:
        session = Session()
        anonymous = session.get_credentials() is None
        config = Config(
            connect_timeout=CONNECT,
            read_timeout=SILENCE,
            retries={"total_max_attempts": 1},  # a second layer of attempts would hide that an answer was lost
            max_pool_connections=2 * WORKERS,
            s3={"payload_signing_enabled": True},  # for servers that check a signature's SHA-256 and no checksum
            request_checksum_calculation="when_required",  # else as a trailer, which not every server reads
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if anonymous else None,
        )
        return session.create_client("s3", config=config), anonymous
    except (BotoCoreError, ValueError) as error:
        failed = type(error).__name__
    cause, next_step = _REASONS["0"]
    raise StorageError(f"{uri}: no connection can be set up: {failed}", cause=cause, next_step=next_step)
