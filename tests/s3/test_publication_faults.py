"""A whole publication over a network and a server that misbehave: it ends as if undisturbed, or it ends clearly.

"One in five" requests go wrong, by a seed that is printed; what can be repeated is repeated. Where every attempt goes
wrong the command ends with a message and an exit code, no release is there, and the same command mends it later.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from storage.publish import RELEASE_KEY
from tests.flows.conftest import result, verbatim
from tests.s3.faults import ALWAYS, anything, cut_upload, empty_listing, one_in
from tests.s3.proxy import (
    Fault,
    Proxy,
    Request,
    Stale,
    When,
    completions,
    cut_answer,
    cut_request,
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
from tests.s3.server import Server
from tests.s3.small_run import address, content

MANIFEST = "mix/manifest.json"


def writes(request: Request) -> bool:
    return puts(request) or part_puts(request)


# Name → (what goes wrong, with which requests, one in how many).
PASSING: dict[str, tuple[Fault, When, int]] = {
    "answers cut mid-body": (cut_answer, gets, 5),
    "uploads cut mid-body": (cut_upload, writes, 5),
    "requests lost": (cut_request, anything, 5),
    "answers lost": (lost_answer, anything, 5),
    "500": (failing(500, "InternalError"), anything, 5),
    "500, but done": (failing(500, "InternalError", done=True), anything, 5),
    "503 slow down": (failing(503, "SlowDown"), anything, 5),
    "503 slow down, but done": (failing(503, "SlowDown", done=True), anything, 5),
    "200 with an error on completion": (failing(200, "InternalError"), completions, 2),
    "200 with an error on completion, but done": (failing(200, "InternalError", done=True), completions, 2),
    "wrong bytes going": (wrong_request, writes, 5),
    "NUL blocks going": (nul_request, writes, 5),
    "wrong bytes coming": (wrong_answer, gets, 25),
    "NUL blocks coming": (nul_answer, gets, 25),
    "stale listings": (Stale(), listings, 1),
    "stalls of 10 s": (stalling(10), anything, 60),
}


@pytest.mark.parametrize("name", PASSING)
def test_publishing_survives(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path, name: str
) -> None:
    fault, when, count = PASSING[name]
    seed = secrets.randbelow(10**6)
    proxy.fault(fault, when=one_in(count, when, seed), times=ALWAYS)
    verbatim("publish", trained, "--target", address(tmp_path.name))
    print(f"{name}: {proxy.faulted} of {len(proxy.requests)} requests went wrong, seed {seed}")
    assert proxy.faulted
    assert content(at_server, tmp_path.name) == undisturbed


@pytest.mark.parametrize("name", [name for name in PASSING if PASSING[name][1] in (gets, listings, anything)])
def test_verifying_survives(undisturbed: dict[str, bytes], proxy: Proxy, name: str) -> None:
    fault, when, count = PASSING[name]
    seed = secrets.randbelow(10**6)
    proxy.fault(fault, when=one_in(count, when, seed), times=ALWAYS)
    said = result("verify", address("undisturbed"))
    print(f"{name}: {proxy.faulted} of {len(proxy.requests)} requests went wrong, seed {seed}")
    assert proxy.faulted and said[0]["says"].startswith(f"run {json.loads(undisturbed[RELEASE_KEY])['body']['run']}")


def reads(key: str) -> When:
    """True of reading the object whose address ends so."""
    return lambda request: gets(request) and request.path.partition("?")[0].endswith("/" + key)


# Name → (what goes wrong each time, with which requests, exit code, what is said).
ENDING: dict[str, tuple[Fault, When, int, str]] = {
    "no server": (cut_request, anything, 1, "after 8 attempts"),
    "500": (failing(500, "InternalError"), writes, 1, "HTTP status 500, InternalError, after 8 attempts"),
    "503": (failing(503, "SlowDown"), writes, 1, "HTTP status 503, SlowDown, after 8 attempts"),
    "200 with an error on completion": (failing(200, "Unheard"), completions, 1, "after 8 attempts"),
    "no permission": (failing(403, "AccessDenied"), writes, 1, "403 AccessDenied"),
    "wrong bytes going": (wrong_request, part_puts, 1, "after 8 attempts"),
    "an object that reads back wrong": (wrong_answer, reads(MANIFEST), 11, MANIFEST),
    "an object that reads back NUL": (nul_answer, reads(MANIFEST), 11, MANIFEST),
}


@pytest.mark.parametrize("name", ENDING)
def test_publishing_ends_clearly_and_goes_on_later(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path, name: str
) -> None:
    fault, when, code, says = ENDING[name]
    target = address(tmp_path.name)
    proxy.fault(fault, when=when, times=ALWAYS)
    said = verbatim("publish", trained, "--target", target, expect=code).stderr
    assert says in said and "likely cause" in said
    left = content(at_server, tmp_path.name)
    assert RELEASE_KEY not in left
    assert not [key for key, data in left.items() if not key.startswith(".probe-") and undisturbed.get(key) != data]
    proxy.no_faults()
    verbatim("publish", trained, "--target", target)
    assert content(at_server, tmp_path.name) == undisturbed


@pytest.mark.parametrize("fault", [wrong_answer, nul_answer, cut_answer], ids=["wrong", "NUL", "cut"])
def test_verifying_accepts_nothing_wrong(undisturbed: dict[str, bytes], proxy: Proxy, fault: Fault) -> None:
    """Whichever object comes damaged, each time it is asked for, the command says which and fails."""
    for key in secrets.SystemRandom().sample(sorted(undisturbed), 4):
        proxy.no_faults()
        proxy.fault(fault, when=reads("undisturbed/" + key), times=ALWAYS)
        code = 1 if fault is cut_answer else 11
        said = verbatim("verify", address("undisturbed"), expect=code).stderr
        assert proxy.faulted and key in said, key


def test_an_old_listing_hides_nothing_from_who_verifies(undisturbed: dict[str, bytes], proxy: Proxy) -> None:
    """Objects that a listing leaves out are read all the same, or missed: never passed over."""
    proxy.fault(empty_listing, when=listings, times=ALWAYS)
    verbatim("verify", address("undisturbed"))
    asked = {request.path.partition("?")[0].partition("undisturbed/")[2] for request in proxy.requests}
    assert asked >= undisturbed.keys()
