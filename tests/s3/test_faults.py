"""A network and a server that misbehave: nothing is lost, nothing wrong is accepted, what cannot work ends clearly."""

import os
import re
import time
from dataclasses import replace

import pytest

from storage import s3_requests
from storage.errors import InputFault, MissingObject, StorageError
from storage.objects import MAX_OBJECT
from storage.s3_upload import PART
from storage.store import S3Store, object_digest
from tests.s3.proxy import (
    Answer,
    Fault,
    Forward,
    Proxy,
    Request,
    Stale,
    When,
    completions,
    cut_answer,
    cut_request,
    dripping,
    failing,
    gets,
    listings,
    lost_answer,
    nul_answer,
    nul_request,
    part_puts,
    puts,
    stalling,
    wrong_answer,
    wrong_request,
)

SHORT = os.urandom(50_000)
LONG = os.urandom(1 << 20) * 18  # three parts
PASSING: dict[str, Fault] = {
    "request cut": cut_request,
    "answer lost": lost_answer,
    "500": failing(500, "Unheard"),
    "500, but done": failing(500, "Unheard", done=True),
    "503": failing(503, "SlowDown"),
    "503, but done": failing(503, "SlowDown", done=True),
    "429": failing(429, "TooManyRequests"),
    "409": failing(409, "ConditionalRequestConflict"),
    "wrong bytes": wrong_request,
    "NUL bytes": nul_request,
}


@pytest.fixture
def proven(proxy: Proxy, store: S3Store, impatient: None) -> S3Store:
    """A store whose probe is behind it, so that the next request is the one that goes wrong."""
    store.create("first", b"")
    return store


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", PASSING)
def test_a_short_write_survives(proven: S3Store, proxy: Proxy, name: str, times: int) -> None:
    proxy.fault(PASSING[name], when=puts, times=times)
    assert proven.create("k", SHORT) and not proven.create("k", SHORT)
    assert not proxy.faults_left and proven.read("k") == SHORT and proven.list() == ["first", "k"]


@pytest.mark.parametrize("name", PASSING)
def test_a_part_survives(proven: S3Store, proxy: Proxy, name: str) -> None:
    proxy.fault(PASSING[name], when=part_puts, times=3)
    assert proven.create("k", LONG)
    assert not proxy.faults_left and proven.read("k") == LONG


OF_COMPLETIONS = {name: fault for name, fault in PASSING.items() if "bytes" not in name} | {
    "200 with an error": failing(200, "Unheard"),
    "200 with an error, but done": failing(200, "Unheard", done=True),
}


@pytest.mark.parametrize("name", OF_COMPLETIONS)
def test_a_completion_survives(proven: S3Store, proxy: Proxy, name: str) -> None:
    proxy.fault(OF_COMPLETIONS[name], when=completions, times=2)
    assert proven.create("k", LONG)
    assert not proxy.faults_left and proven.read("k") == LONG and not proven.create("k", LONG)


def test_a_completed_upload_may_be_forgotten(proven: S3Store, proxy: Proxy) -> None:
    """Some servers answer a repeated completion with 404: it is ours if the object is there, else an error."""
    proxy.fault(lost_answer, when=completions)
    proxy.fault(failing(404, "NoSuchUpload"), when=completions)
    assert proven.create("k", LONG) and not proxy.faults_left
    proxy.fault(failing(404, "NoSuchUpload"), when=completions)
    with pytest.raises(StorageError, match="404 NoSuchUpload") as caught:
        proven.create("l", LONG)
    assert not isinstance(caught.value, MissingObject) and proven.list() == ["first", "k"]


@pytest.mark.parametrize("name", ["answer lost", "500, but done", "request cut"])
@pytest.mark.parametrize("data", [SHORT, LONG], ids=["short", "long"])
def test_a_lost_answer_is_no_success_where_another_was_first(
    proven: S3Store, proxy: Proxy, at_server: object, name: str, data: bytes
) -> None:
    """The 412 of the second attempt may be due to our own first, or to somebody else's: the bytes tell."""
    other = bytes([data[0] ^ 1]) + data[1:]

    def beaten(request: object, forward: object) -> object:
        rival.create("k", other)
        return PASSING[name](request, forward)  # type: ignore[arg-type]

    rival = S3Store.open(proven.uri)
    rival.create("rivals", b"")
    proxy.fault(beaten, when=lambda r: "/k" in r.path and (puts if data is SHORT else completions)(r))  # type: ignore
    assert proven.create("k", data) is False
    assert proven.read("k") == other


def test_an_answer_that_never_comes(proven: S3Store, proxy: Proxy) -> None:
    """The object is there all the same, so the write was done; where it is not, that is an error."""
    proxy.fault(lost_answer, when=puts, times=8)
    assert proven.create("k", SHORT)
    proxy.fault(cut_request, when=puts, times=8)
    with pytest.raises(StorageError, match="ConnectionClosedError, after 8 attempts"):
        proven.create("l", SHORT)
    proxy.fault(failing(500, "InternalError"), when=completions, times=8)
    with pytest.raises(StorageError, match="HTTP status 500, InternalError, after 8 attempts"):
        proven.create("m", LONG)
    assert not proxy.faults_left and proven.list() == ["first", "k"]


@pytest.mark.parametrize("data", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", ["answer cut", *(n for n in PASSING if "bytes" not in n)])
def test_a_read_survives(proven: S3Store, proxy: Proxy, name: str, data: bytes) -> None:
    proven.create("k", data)
    proxy.fault(PASSING.get(name, cut_answer), when=gets, times=3)
    assert proven.read("k") == data
    proxy.fault(PASSING.get(name, cut_answer), when=gets, times=3)
    assert proven.read_range("k", 1000, len(data) - 2000) == data[1000:-1000]
    assert not proxy.faults_left


@pytest.mark.parametrize("fault", [wrong_answer, nul_answer], ids=["wrong", "NUL"])
def test_wrong_bytes_are_never_accepted(proven: S3Store, proxy: Proxy, fault: Fault) -> None:
    proven.create("k", LONG)
    proxy.fault(fault, when=gets)  # once: damaged on the way
    assert proven.read("k", object_digest(LONG)) == LONG and not proxy.faults_left
    proxy.fault(fault, when=gets, times=99)  # always: damaged where it lies
    with pytest.raises(InputFault, match=object_digest(LONG)):
        proven.read("k", object_digest(LONG))


def unproven(request: Request, forward: Forward) -> Answer:
    """A completion by a server that states no checksum of the whole."""
    answer = forward(request)
    return replace(answer, body=re.sub(rb"<ChecksumCRC32>.*?</ChecksumCRC32>", b"", answer.body))


def test_a_long_write_is_read_back_where_no_checksum_proves_it(proven: S3Store, proxy: Proxy) -> None:
    for key, proof, read in (("k", True, 1), ("l", False, 1 + 3)):  # one that finds no object there
        before = len(proxy.requests)
        if not proof:
            proxy.fault(unproven, when=completions)
        assert proven.create(key, LONG) and sum(gets(request) for request in proxy.requests[before:]) == read
    assert not proxy.faults_left


@pytest.mark.parametrize("fault", [wrong_answer, nul_answer], ids=["wrong", "NUL"])
def test_a_long_write_that_reads_back_wrong_is_no_success(proven: S3Store, proxy: Proxy, fault: Fault) -> None:
    proxy.fault(unproven, when=completions)
    proxy.fault(fault, when=gets, times=99)
    with pytest.raises(StorageError, match="does not read back as it was written"):
        proven.create("k", LONG)


def test_a_stale_listing_costs_nothing_but_a_second_look(proven: S3Store, proxy: Proxy) -> None:
    """Whether an object exists is asked of the object, never of a listing."""
    proxy.fault(Stale(), when=listings, times=99)
    assert proven.list() == ["first"]
    assert proven.create("k", SHORT) and proven.list() == ["first"]
    assert proven.read("k") == SHORT and not proven.create("k", b"other") and proven.size("k") == len(SHORT)
    proven.delete("k")
    with pytest.raises(MissingObject):
        proven.read("k")


def test_stalls(proven: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 10 seconds is waited for; one that lasts longer than SILENCE is another lost answer."""
    proven.create("k", SHORT)
    began = time.monotonic()
    proxy.fault(stalling(10), when=gets)
    assert proven.read("k") == SHORT and time.monotonic() - began >= 10
    monkeypatch.setattr(s3_requests, "SILENCE", 1)
    hasty = S3Store.open(proven.uri)
    proxy.fault(stalling(10), when=gets)
    began = time.monotonic()
    assert hasty.read("k") == SHORT and time.monotonic() - began < 8 and not proxy.faults_left


def heads(request: Request) -> bool:
    return request.method == "HEAD"


MALFORMED: dict[str, tuple[When, Answer]] = {
    "HEAD with a word for a length": (heads, Answer(200, {"Content-Length": "long"}, b"")),
    "HEAD with a negative length": (heads, Answer(200, {"Content-Length": "-5"}, b"")),
    "no date": (gets, Answer(206, {"Last-Modified": "yesterday", "Content-Range": "bytes 0-1/2"}, b"ab")),
    "a page for a listing": (listings, Answer(200, {"Content-Type": "text/html"}, b"<html><body/></html>")),
    "an entry without a key": (
        listings,
        Answer(200, {}, b"<ListBucketResult><Name>b</Name><Contents><Size>3</Size></Contents></ListBucketResult>"),
    ),
    "an upload without a name": (
        lambda request: request.method == "POST" and "uploads" in request.path,
        Answer(200, {}, b"<InitiateMultipartUploadResult/>"),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_an_answer_that_is_none(proven: S3Store, proxy: Proxy, name: str) -> None:
    """Asked again, and where it stays so, one error."""
    when, answer = MALFORMED[name]

    def everything(key: str) -> tuple[int, bytes, bool, bool]:
        return proven.size("first"), proven.read("first"), "first" in proven.list(), proven.create(key, LONG)

    expected = everything("k")
    proxy.fault(lambda request, forward: answer, when=when, times=2)
    assert everything("l") == expected and not proxy.faults_left
    proxy.fault(lambda request, forward: answer, when=when, times=99)
    with pytest.raises(StorageError, match=r"an answer that .*, after 8 attempts"):
        everything("m")


def test_a_length_that_is_denied(proven: S3Store, proxy: Proxy) -> None:
    """No zeros stand for what a server says is there and does not give."""
    proven.create("k", SHORT)
    proxy.fault(failing(416, "InvalidRange"), when=gets)
    with pytest.raises(InputFault, match="k holds 50000 bytes, but the server denies bytes 0 to 4"):
        proven.read_range("k", 0, 4)


def test_a_server_that_drips(proven: S3Store, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """No silence is ever long, and it would take days: there is an end to it, for listings too."""
    monkeypatch.setattr(s3_requests, "TOTAL", 3.0)
    proven.create("k", SHORT)
    for when, call in ((gets, lambda: proven.read("k")), (listings, proven.list)):
        proxy.fault(dripping(0.5), when=when)
        began = time.monotonic()
        with pytest.raises(StorageError, match="no whole answer within 3 seconds, after 1 attempt") as caught:
            call()
        assert 3 <= time.monotonic() - began < 10 and "too slow" in str(caught.value) and not proxy.faults_left
        assert call() in (SHORT, ["first", "k"])


def test_an_object_that_is_said_to_be_endless(proven: S3Store, proxy: Proxy) -> None:
    """A length that no object may have is refused after the first piece, whatever the server could send."""
    proven.create("k", LONG)

    def longer(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        total = re.sub(r"/\d+$", f"/{9 * 10**12}", answer.headers["Content-Range"])
        return replace(answer, headers={**answer.headers, "Content-Range": total})

    proxy.fault(longer, when=gets, times=99)
    for limit, most in ((MAX_OBJECT, PART), (1000, 1001)):
        sent = proxy.sent
        with pytest.raises(InputFault, match=f"k holds 9000000000000 bytes, at most {limit} are allowed"):
            proven.read("k", limit=limit)
        assert proxy.sent - sent < most + 2000
