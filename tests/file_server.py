"""A web server on this machine that serves files as a hub of data sets does, and misbehaves when told to.

    /PATH                                       the file itself: HEAD, GET, Range, ETag
    /datasets/SET/resolve/COMMIT/PATH           302 to /cdn/… on another host name, with the file's size and sha256
    /api/datasets/SET/tree/COMMIT               its files, two on a page, those that end in .md kept in git
    /gated/datasets/SET/resolve/COMMIT/PATH     the same for who sends the token

`faults`: what the next answers do wrong, first come, first served; an answer is right when none is left. `faults_of`:
the same for the answers to one path.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

TOKEN = "hf_of_a_test"
LATEST = "Mon, 30 Nov 2026 00:00:00 GMT"


class Asked(NamedTuple):
    """A request that the server got."""

    method: str
    host: str
    path: str
    range: str | None
    authorization: str | None


class FileServer(ThreadingHTTPServer):
    """files: by path without a leading slash. Stops answering when the `serving` block ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[Callable[[_Handler, bytes], None]] = []
        self.faults_of: dict[str, list[Callable[[_Handler, bytes], None]]] = {}
        self.asked: list[Asked] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def ranges(self) -> list[str | None]:
        """The Range of each GET that was answered with a file's bytes, in order."""
        return [asked.range for asked in self.asked if asked.method == "GET" and "/resolve/" not in asked.path]


@contextmanager
def serving() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers, path = self.headers, self.path.lstrip("/")
        asked = Asked(self.command, headers["Host"], path, headers["Range"], headers["Authorization"])
        self.server.asked.append(asked)
        gated = path.startswith("gated/")
        if path.startswith("api/"):
            return self._tree(path)
        if gated and headers["Authorization"] != f"Bearer {TOKEN}":
            return self.refuse(401)
        name = path.removeprefix("gated/")
        data = self.server.files.get(name.removeprefix("cdn/"))
        if data is None:
            return self.refuse(404)
        if "/resolve/" in name and not name.startswith("cdn/"):
            return self._redirect(name, data)
        faults = self.server.faults_of.get(path) or self.server.faults
        fault = faults.pop(0) if faults and self.command == "GET" else Right()
        fault(self, data)
        return None

    def _redirect(self, name: str, data: bytes) -> None:
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.server.server_port}/cdn/{name}")
        self.send_header("X-Repo-Commit", name.split("/resolve/")[1].split("/")[0])
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _tree(self, path: str) -> None:
        where, _, query = path.removeprefix("api/").partition("?")
        folder = where.replace("/tree/", "/resolve/") + "/"
        entries: list[dict[str, object]] = [{"type": "directory", "oid": "d" * 40, "path": "data", "size": 0}]
        for name in sorted(self.server.files, reverse=True):
            if name.startswith(folder):
                data = self.server.files[name]
                entry = {"type": "file", "oid": "f" * 40, "path": unquote(name[len(folder) :]), "size": len(data)}
                lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                entries.append(entry if name.endswith(".md") else entry | {"lfs": lfs})
        if len(entries) == 1:
            return self.refuse(404)
        start = int(dict(parse_qsl(query)).get("cursor", 0))
        body = json.dumps(entries[start : start + 2]).encode()
        self.send_response(200)
        if start + 2 < len(entries):
            self.send_header("Link", f'<{self.server.url}/api/{where}?cursor={start + 2}>; rel="next"')
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return self.send(body)

    def refuse(self, status: int, **more: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | more).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def begin(self, data: bytes, ranges: bool = True, length: bool = True, shift: int = 0) -> bytes:
        """Send status and headers for what was asked of `data`; returns the bytes that are to follow."""
        found = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "") if ranges else None
        start = int(found[1]) + shift if found else 0
        if found and start >= len(data):
            self.refuse(416, Content_Range=f"bytes */{len(data)}")
            return b""
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if length:
            self.send_header("Content-Length", str(len(data) - start))
        else:
            self.send_header("Connection", "close")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Last-Modified", LATEST)
        self.send_header("Accept-Ranges", "bytes" if ranges else "none")
        self.end_headers()
        return data[start:]

    def send(self, data: bytes) -> None:
        if self.command == "GET":
            self.wfile.write(data)
            self.wfile.flush()

    def close(self, reset: bool = False) -> None:
        """End the connection, by a reset if asked."""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the tests look at `asked`."""


class Right(NamedTuple):
    """No fault."""

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(data))


class CutOff(NamedTuple):
    """`after` bytes of what was asked, then the connection ends: in order, or by a reset."""

    after: int
    reset: bool = False
    told: bool = True  # how many bytes there should have been

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(data, length=self.told)[: self.after])
        to.close(self.reset)


class Stalled(NamedTuple):
    """`after` bytes of what was asked, then silence."""

    after: int

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(data)[: self.after])
        to.server.over.wait()
        to.close_connection = True


class Status(NamedTuple):
    """No file, but a status; with seconds to wait, if any."""

    code: int
    wait: str = ""

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.refuse(self.code, **({"Retry_After": self.wait} if self.wait else {}))


class Other(NamedTuple):
    """Another file, in order."""

    data: bytes

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(self.data))


class Whole(NamedTuple):
    """All of the file whatever was asked, with its length or without."""

    told: bool = True

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(data, ranges=False, length=self.told))
        to.close_connection = not self.told


class Misplaced(NamedTuple):
    """The part that begins a byte later than the one asked for."""

    def __call__(self, to: _Handler, data: bytes) -> None:
        to.send(to.begin(data, shift=1))
