"""An HTTP proxy before an S3 server: it counts the bytes on the wire, and misbehaves when told to.

    proxy.fault(lost_answer, when=puts, times=2)

makes the next two requests that `when` is true of go wrong in that way; every other request passes unchanged. A fault
is given the request and a function that forwards one, and returns the answer that the client gets.
"""

import http.client
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    """A request as it arrived; path with its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What goes back. cut: the connection ends after so many bytes of the body; stall: seconds of silence before that
    place, or at half of the body; drip: seconds between every two bytes from there on."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: int | None = None
    stall: float = 0.0
    drip: float = 0.0


class NoAnswer(Exception):
    """Raised by a fault: the connection ends and nothing goes back."""


Forward = Callable[[Request], Answer]
Fault = Callable[[Request, Forward], Answer]
When = Callable[[Request], bool]


@dataclass
class _Due:
    fault: Fault
    when: When
    times: int


class Proxy(ThreadingHTTPServer):
    """requests: all that came, in order; faulted: how many of them went wrong. received, sent: bytes from and to
    clients, heads included."""

    daemon_threads = True

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.requests: list[Request] = []
        self.received = self.sent = self.faulted = 0
        self.lock = threading.Lock()
        self.rewrite: Callable[[Request], Request] = lambda request: request  # before it is forwarded
        self._due: list[_Due] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(self, fault: Fault, when: When = lambda request: True, times: int = 1) -> None:
        self._due.append(_Due(fault, when, times))

    def no_faults(self) -> None:
        self._due.clear()

    @property
    def faults_left(self) -> int:
        return sum(due.times for due in self._due)

    def answer(self, request: Request) -> Answer:
        with self.lock:
            self.requests.append(request)
            due = next((due for due in self._due if due.times and due.when(request)), None)
            if due:
                due.times -= 1
                self.faulted += 1
        return due.fault(request, self.forward) if due else self.forward(request)

    def forward(self, request: Request) -> Answer:
        """The server's answer; NoAnswer if the body is shorter than its head says: the client died, so its connection
        to the server ends too."""
        request = self.rewrite(request)
        connection = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=60)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in ("expect", "connection"):
                    connection.putheader(name, value)
            connection.endheaders(request.body or None)
            if len(request.body) < int(request.headers.get("Content-Length") or 0):
                raise NoAnswer
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        head = len(self.raw_requestline) + sum(len(f"{name}: {value}\r\n") for name, value in self.headers.items())
        with self.server.lock:
            self.server.received += head + 2 + len(body)
        try:
            self._send(self.server.answer(Request(self.command, self.path, dict(self.headers), body)))
        except NoAnswer:
            self._end()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any

    def _send(self, answer: Answer) -> None:
        body = b"" if self.command == "HEAD" else answer.body
        length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": length}.items())
        self._write(f"HTTP/1.1 {answer.status} {http.client.responses.get(answer.status, '')}\r\n{head}\r\n".encode())
        until = len(body) if answer.cut is None else answer.cut
        middle = until if answer.cut is not None else until // 2
        self._write(body[:middle])
        time.sleep(answer.stall)
        step = 1 if answer.drip else max(until - middle, 1)
        for at in range(middle, until, step):
            self._write(body[at : min(at + step, until)])
            time.sleep(answer.drip)
        if answer.cut is not None:
            self._end()

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        with self.server.lock:
            self.server.sent += len(data)

    def _end(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


_OWN = ("content-length", "transfer-encoding", "connection")


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """A proxy before the server on that port of this machine, until the block ends."""
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


def puts(request: Request) -> bool:
    """Writing an object by one request."""
    return request.method == "PUT" and "uploadId" not in request.path


def part_puts(request: Request) -> bool:
    return request.method == "PUT" and "uploadId" in request.path


def completions(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.path


def gets(request: Request) -> bool:
    """Reading an object, whole or a range."""
    return request.method == "GET" and "list-type" not in request.path


def listings(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.path


def cut_answer(request: Request, forward: Forward) -> Answer:
    answer = forward(request)
    return replace(answer, cut=len(answer.body) // 2)


def cut_request(request: Request, forward: Forward) -> Answer:
    """The server never sees it."""
    raise NoAnswer


def lost_answer(request: Request, forward: Forward) -> Answer:
    """The server does what was asked, and nobody hears of it."""
    forward(request)
    raise NoAnswer


def failing(status: int, code: str, done: bool = False) -> Fault:
    """An error answer; done: the server did all the same what was asked."""

    def fault(request: Request, forward: Forward) -> Answer:
        if done:
            forward(request)
        return Answer(status, {"Content-Type": "application/xml"}, _error(code))

    return fault


def wrong_answer(request: Request, forward: Forward) -> Answer:
    """Bytes of the right length that are others."""
    answer = forward(request)
    at = random.randrange(len(answer.body))
    return replace(answer, body=answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :])


def nul_answer(request: Request, forward: Forward) -> Answer:
    """A block of the body is NUL, as after a crash of a file system."""
    answer = forward(request)
    half = len(answer.body) // 2
    return replace(answer, body=answer.body[:half] + bytes(len(answer.body) - half))


def wrong_request(request: Request, forward: Forward) -> Answer:
    return forward(request._replace(body=bytes([request.body[0] ^ 1]) + request.body[1:]))


def nul_request(request: Request, forward: Forward) -> Answer:
    return forward(request._replace(body=bytes(len(request.body))))


def stalling(seconds: float) -> Fault:
    """Silence in the middle of the answer's body."""
    return lambda request, forward: replace(forward(request), stall=seconds)


def dripping(seconds: float) -> Fault:
    """From the middle of the answer's body on, a byte now and then."""
    return lambda request, forward: replace(forward(request), drip=seconds)


@dataclass
class Stale:
    """Answers as it did the first time, whatever was written since."""

    old: dict[str, Answer] = field(default_factory=dict)

    def __call__(self, request: Request, forward: Forward) -> Answer:
        if request.path not in self.old:
            self.old[request.path] = forward(request)
        return self.old[request.path]


def _error(code: str) -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>made up</Message></Error>'.encode()
    )
