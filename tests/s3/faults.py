"""Faults of a whole publication: uploads cut half-way, one request in so many, two writers at one moment, a kill."""

import os
import random
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.s3.proxy import Answer, Fault, Forward, NoAnswer, Request, When
from tests.s3.server import Server

ALWAYS = 10**9  # times
MOMENTS = ("before", "halfway", "after")


def anything(request: Request) -> bool:
    return True


def one_in(count: int, when: When = anything, seed: int = 0) -> When:
    """True of one of each `count` of these requests: which, is chance."""
    chance, seen, hit = random.Random(seed), 0, 0

    def one(request: Request) -> bool:
        nonlocal seen, hit
        if not when(request):
            return False
        if seen % count == 0:
            hit = seen + chance.randrange(count)
        seen += 1
        return seen - 1 == hit

    return one


def first(when: When) -> When:
    """True of the first of these requests for each address and range."""
    seen: set[tuple[str, str]] = set()

    def one(request: Request) -> bool:
        what = request.path, request.headers.get("Range", "")
        if not when(request) or what in seen:
            return False
        seen.add(what)
        return True

    return one


def number(wanted: int) -> When:
    """True of the request with that number, from 1."""
    seen = 0

    def when(request: Request) -> bool:
        nonlocal seen
        seen += 1
        return seen == wanted

    return when


def cut_upload(request: Request, forward: Forward) -> Answer:
    """The server gets half of the body and then the end of the connection."""
    return forward(request._replace(body=request.body[: len(request.body) // 2]))


def empty_listing(request: Request, forward: Forward) -> Answer:
    """A listing that is older than every object."""
    answer = forward(request)
    start, end = answer.body.find(b"<Contents>"), answer.body.rfind(b"</Contents>") + len(b"</Contents>")
    return answer if start < 0 else replace(answer, body=answer.body[:start] + answer.body[end:])


def years_old(name: str) -> Fault:
    """In listings, whatever has a key that ends so was written years ago."""

    def date(entry: re.Match[bytes]) -> bytes:
        named = f"{name}</Key>".encode() in entry[0]
        return re.sub(rb"(<LastModified>|<Initiated>)\d{4}", rb"\g<1>2001", entry[0]) if named else entry[0]

    def fault(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        return replace(answer, body=re.sub(rb"<(Contents|Upload)>.*?</\1>", date, answer.body, flags=re.DOTALL))

    return fault


def unlisted(name: str) -> Fault:
    """A listing without the object whose key ends so."""
    entry = re.compile(rb"<Contents>(?:(?!</Contents>).)*%s</Key>.*?</Contents>" % name.encode(), re.DOTALL)

    def fault(request: Request, forward: Forward) -> Answer:
        answer = forward(request)
        return replace(answer, body=entry.sub(b"", answer.body))

    return fault


@dataclass
class Kill:
    """SIGKILL for a process while it waits for an answer, which stands for one of three moments: the server has not
    seen the request, has half of its body, has done what was asked."""

    moment: str  # one of MOMENTS
    victim: int  # its process id

    def __call__(self, request: Request, forward: Forward) -> Answer:
        os.kill(self.victim, signal.SIGKILL)
        if self.moment == "halfway":
            cut_upload(request, forward)
        if self.moment == "after":
            forward(request)
        raise NoAnswer


@dataclass
class Together:
    """Two requests for one thing reach the server at one moment: the first waits for the second, `patience` seconds."""

    patience: float = 3.0
    met: int = 0
    answers: list[tuple[str, str, int]] = field(default_factory=list)  # (method, address, status)
    waiting: dict[str, threading.Event] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Request, forward: Forward) -> Answer:
        what = request.path.partition("?")[0]
        with self.lock:
            other = self.waiting.pop(what, None)
            mine = None if other else self.waiting.setdefault(what, threading.Event())
        if other:
            self.met += 1
            other.set()
        elif mine and not mine.wait(self.patience):
            with self.lock:
                self.waiting.pop(what, None)
        answer = forward(request)
        self.answers.append((request.method, what, answer.status))
        return answer


def without_token(server: Server) -> Callable[[Request], Request]:
    """For `Proxy.rewrite`: signed anew without the session's token, for a server that knows no sessions."""
    from botocore.auth import S3SigV4Auth  # here: these tests are collected, not run, where botocore is missing
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    def rewrite(request: Request) -> Request:
        ours = ("x-amz-security-token", "authorization", "x-amz-date")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in ours}
        anew = AWSRequest(request.method, server.endpoint + request.path, headers, request.body)
        S3SigV4Auth(Credentials(server.access, server.secret), "s3", "us-east-1").add_auth(anew)
        return request._replace(headers=dict(anew.headers.items()))

    return rewrite
