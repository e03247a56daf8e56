"""One answer of a web server or an s3 store: a file's bytes from some place on, and how many the whole file has."""

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from storage.errors import MissingObject, VerbatimError

SILENCE = 60.0  # seconds without a byte after which a connection is given up
MAX_PAGE = 64 << 20  # bytes of one page of a list
_BROKEN = (OSError, http.client.HTTPException)  # what a connection may raise at any time; a timeout is an OSError
_BUSY = {408, 425, 429}  # and all from 500 on: the server may answer another time


class Passing(Exception):
    """A failure that may pass; `wait`: seconds that the server asks to be left alone."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


class Answer(NamedTuple):
    """The file's bytes from `start` on, by read(most): b"" at the end. `total`: bytes of the whole file, if told."""

    start: int
    total: int | None
    read: Callable[[int], bytes]


@contextmanager
def open_remote(url: str, start: int, token: str | None) -> Iterator[Answer]:
    """Ask for the file from byte `start` on; the answer may begin at 0 instead. Raises Passing or a VerbatimError."""
    with (_s3 if url.startswith("s3:") else _http)(url, start, token) as answer:
        yield answer


@contextmanager
def _http(url: str, start: int, token: str | None) -> Iterator[Answer]:
    with _ask(url, start, token) as response:
        begins, total = _place(response)
        if begins not in (0, start):
            raise Passing(f"the server sent bytes from {begins} on, where those from {start} were asked for")
        yield Answer(begins, total, lambda most: _piece(response, most))


def read_page(url: str, token: str | None) -> tuple[Any, str | None]:
    """(JSON value, address of the next page) of one page of a list. Raises VerbatimError."""
    try:
        with _ask(url, 0, token) as response:
            following = re.search(r'<([^>]*)>; *rel="next"', response.headers.get("Link", ""))
            return json.loads(response.read(MAX_PAGE)), following[1] if following else None
    except (Passing, ValueError, *_BROKEN) as error:
        raise VerbatimError(
            f"{url}: {error}", cause="the network or the server is down", next_step="run the same command again later"
        ) from error


def _ask(url: str, start: int, token: str | None) -> Any:
    """The answer of a web server to GET, from byte `start` on if there are so many."""
    request = urllib.request.Request(url, headers={"User-Agent": "verbatim", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token:  # goes to the hub alone: the files themselves lie at another host
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        return urllib.request.urlopen(request, timeout=SILENCE)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the file is shorter than what was kept of it
            return _ask(url, 0, token)
        raise _refusal(url, error) from None
    except _BROKEN as error:
        raise Passing(_said(error)) from error


def _place(response: Any) -> tuple[int, int | None]:
    """(first byte, bytes of the whole file if told) of an answer."""
    if response.status == 206:
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if told is None:
            raise Passing(f"the server sent a part without its place: {response.headers.get('Content-Range')!r}")
        return int(told[1]), None if told[2] == "*" else int(told[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _piece(response: Any, most: int) -> bytes:
    try:
        return bytes(response.read1(most))
    except _BROKEN as error:
        raise Passing(_said(error)) from error


def _said(error: BaseException) -> str:
    reason = getattr(error, "reason", error)
    return f"no connection, or it broke: {reason or type(error).__name__}"


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    said = f"the server answers {error.code} {error.reason}"
    if error.code in _BUSY or error.code >= 500:
        wait = error.headers.get("Retry-After", "")
        return Passing(said, float(wait) if wait.isdecimal() else 0.0)
    if error.code in (404, 410):
        return MissingObject(f"{url}: {said}", cause="another address is meant, or the file was taken away")
    if error.code in (401, 403):
        return VerbatimError(
            f"{url}: {said}",
            cause="the file is open to some only, or there is none",
            next_step="for a data set of the hub: accept its terms there, and set HF_TOKEN to a token of your account",
        )
    return VerbatimError(f"{url}: {said}", cause="the address is no file's, or the server is set up wrongly")


@contextmanager
def _s3(url: str, start: int, token: str | None) -> Iterator[Answer]:
    import fsspec  # with s3fs, which only those need who have such sources

    try:
        files, path = fsspec.url_to_fs(url, use_listings_cache=False)
        total = int(files.size(path))
        file = files.open(path, "rb")
        file.seek(min(start, total))
    except FileNotFoundError:
        raise MissingObject(f"there is no {url}", cause="another bucket or key, or it was taken away") from None
    except Exception as error:  # botocore has a hundred classes for it
        raise _s3_failure(url, error) from error
    with file:
        yield Answer(min(start, total), total, lambda most: _s3_piece(url, file, most))


def _s3_piece(url: str, file: Any, most: int) -> bytes:
    try:
        return bytes(file.read(most))
    except Exception as error:
        raise _s3_failure(url, error) from error


def _s3_failure(url: str, error: Exception) -> Exception:
    said = f"{url} cannot be read: {type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return VerbatimError(said, cause="s3fs is not installed", next_step="pip install s3fs")
    if isinstance(error, OSError) and not isinstance(error, PermissionError):
        return Passing(f"{type(error).__name__}: {error}")
    return VerbatimError(said, cause="no credentials, or not those of this bucket", next_step="see `aws configure`")
