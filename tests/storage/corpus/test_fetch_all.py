"""All files of a mix come at once: how far they are is told, and the first error ends all and keeps what has come."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.corpus import fetch_all
from storage.corpus.fetch_all import FetchAll
from storage.corpus.spec import UrlFile
from storage.errors import MissingObject
from tests.file_server import FileServer, serving

SLOW = 3_000_000  # bytes of a file that comes in pieces


def url_file(server: FileServer, name: str, data: bytes) -> UrlFile:
    server.files[name] = data
    about: dict[str, Any] = {
        "kind": "url",
        "url": f"{server.url}/{name}",
        "licence": "MIT",
        "extract": {"kind": "rows"},
    }
    return UrlFile.model_validate(about | {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})


def drip(pause: float) -> Callable[[Any, bytes], None]:
    """An answer in ten pieces with pauses between them."""

    def answer(handler: Any, data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        try:
            for at in range(0, len(data), len(data) // 10):
                handler.wfile.write(data[at : at + len(data) // 10])
                time.sleep(pause)
        except OSError:  # whoever asked has gone
            return

    return answer


def refuse_once_there_is(part: Path) -> Callable[[Any, bytes], None]:
    """A 404 that comes when `part` has bytes."""

    def answer(handler: Any, data: bytes) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end and not (part.exists() and part.stat().st_size):
            time.sleep(0.01)
        handler.refuse(404)

    return answer


def test_files_come_together_and_how_far_they_are_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_all, "LOOK", 0.05)
    told: list[int] = []
    with serving() as server:
        pins = tuple(url_file(server, f"{n}.jsonl", bytes([n]) * SLOW) for n in range(3))
        server.faults += [drip(0.05)] * 3
        job = FetchAll(pins, tmp_path, told.append)
        assert not job.finished() and job.size == 3 * SLOW
        began = time.monotonic()
        job()
        assert time.monotonic() - began < 2 * 10 * 0.05  # one after another they take three times 0.5 s
    assert job.finished() and sorted(path.name for path in tmp_path.iterdir()) == sorted(pin.sha256 for pin in pins)
    assert told == sorted(told) and told[-1] == 3 * SLOW
    assert any(0 < done < 3 * SLOW and done % SLOW for done in told)


def test_the_first_error_ends_all_and_keeps_what_has_come(tmp_path: Path) -> None:
    with serving() as server:
        slow, gone = url_file(server, "slow.jsonl", b"s" * SLOW), url_file(server, "gone.jsonl", b"g")
        part = tmp_path / f"{slow.sha256}.part"
        server.faults_of = {"slow.jsonl": [drip(0.5)], "gone.jsonl": [refuse_once_there_is(part)]}
        began = time.monotonic()
        with pytest.raises(MissingObject, match=r"gone\.jsonl: the server answers 404"):
            FetchAll((slow, gone), tmp_path, lambda done: None)()
        assert time.monotonic() - began < 4  # the slow file alone takes five
        assert 0 < part.stat().st_size < SLOW
        FetchAll((slow,), tmp_path, lambda done: None)()
        assert [asked.range for asked in server.asked if asked.path == "slow.jsonl"][1] is not None
    assert (tmp_path / slow.sha256).stat().st_size == SLOW
