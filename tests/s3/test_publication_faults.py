"""A whole publication over a network and a server that misbehave: it ends as if undisturbed, or it ends clearly.

One in so many requests goes wrong, by a seed that is printed. Where every attempt goes wrong, the command ends with a
message and an exit code, no release is there, and the same command mends it later.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

import pytest

from flows import checks
from storage.audit.keys import load_or_create_key
from storage.errors import VerbatimError
from storage.publish import publish
from storage.release import RELEASE_KEY
from storage.store import open_store
from tasks.references import KEYS
from tests.flows.conftest import result, verbatim
from tests.s3.faults import ALWAYS, anything, cut_upload, empty_listing, first, number, one_in
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

STORE = address("undisturbed")


def writes(request: Request) -> bool:
    return puts(request) or part_puts(request)


def reads(key: str) -> When:
    """True of reading the object whose address ends so."""
    return lambda request: gets(request) and request.path.partition("?")[0].endswith("/" + key)


def publish_here(trained: Path, target: str) -> None:
    """What `verbatim publish` does, in this process: it takes a fifth of the time."""
    run, mix = (open_store(str(trained / part)) for part in ("run", "mix"))
    publish(run, mix, open_store(target), load_or_create_key(KEYS, "trainer"))


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
    "wrong bytes coming, each once": (wrong_answer, first(gets), 1),
    "NUL blocks coming, each once": (nul_answer, first(gets), 1),
    "stale listings": (Stale(), listings, 1),
    "listings older than all": (empty_listing, listings, 1),
    "stalls of 10 s": (stalling(10), anything, 60),
}
OF_READING = [name for name in PASSING if PASSING[name][1] in (gets, anything) or "coming" in name]


def disturb(proxy: Proxy, name: str) -> None:
    fault, when, count = PASSING[name]
    seed = secrets.randbelow(10**6)
    print(f"{name}: one in {count}, seed {seed}")
    proxy.fault(fault, when=one_in(count, when, seed), times=ALWAYS)


@pytest.mark.parametrize("name", PASSING)
def test_publishing_survives(
    trained: Path,
    undisturbed: dict[str, bytes],
    proxy: Proxy,
    at_server: Server,
    impatient: None,
    tmp_path: Path,
    name: str,
) -> None:
    disturb(proxy, name)
    publish_here(trained, address(tmp_path.name))
    assert proxy.faulted and content(at_server, tmp_path.name) == undisturbed


@pytest.mark.parametrize("name", OF_READING)
def test_verifying_survives(undisturbed: dict[str, bytes], proxy: Proxy, impatient: None, name: str) -> None:
    disturb(proxy, name)
    said = checks.release([STORE])
    assert proxy.faulted and f"{len(undisturbed) - 1} objects" in said[0]["says"]


def test_the_commands_survive_all_of_it_at_once(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path
) -> None:
    """With the pauses that a person would see."""
    target = address(tmp_path.name)
    proxy.fault(stalling(10), when=number(40))
    for fault, when, count in PASSING.values():
        proxy.fault(fault, when=one_in(10 * count, when, secrets.randbelow(10**6)), times=ALWAYS)
    verbatim("publish", trained, "--target", target)
    published = proxy.faulted
    assert content(at_server, tmp_path.name) == undisturbed
    verbatim("verify", target)
    audit = ("audit", target, "--step", "3", "--backend", "reference", "--records", tmp_path / "records")
    assert result(*audit)["verdict"] == "match"
    print(f"{published} requests of publishing went wrong, {proxy.faulted - published} of verifying and auditing")
    assert 0 < published < proxy.faulted


# Name → (what goes wrong each time, with which requests, exit code, what is said).
MANIFEST = "mix/manifest.json"
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
    trained: Path,
    undisturbed: dict[str, bytes],
    proxy: Proxy,
    at_server: Server,
    impatient: None,
    tmp_path: Path,
    name: str,
) -> None:
    fault, when, code, says = ENDING[name]
    target = address(tmp_path.name)
    proxy.fault(fault, when=when, times=ALWAYS)
    with pytest.raises(VerbatimError) as caught:
        publish_here(trained, target)
    assert caught.value.exit_code == code and says in str(caught.value) and caught.value.cause
    left = content(at_server, tmp_path.name)
    assert RELEASE_KEY not in left
    assert not [key for key, data in left.items() if not key.startswith(".probe-") and undisturbed.get(key) != data]
    proxy.no_faults()
    publish_here(trained, target)
    assert content(at_server, tmp_path.name) == undisturbed


def test_a_command_ends_clearly(trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, tmp_path: Path) -> None:
    """The same with its exit codes, for one fault that might pass and one that cannot."""
    proxy.fault(failing(503, "SlowDown"), when=writes, times=ALWAYS)
    said = verbatim("publish", trained, "--target", address(tmp_path.name), expect=1).stderr
    assert "HTTP status 503, SlowDown, after 8 attempts" in said and "run the same command again later" in said
    proxy.no_faults()
    proxy.fault(wrong_answer, when=reads(MANIFEST), times=ALWAYS)
    assert MANIFEST in verbatim("verify", STORE, expect=11).stderr
    audit = ("audit", STORE, "--step", "3", "--backend", "reference", "--records", tmp_path)
    assert MANIFEST in result(*audit, expect=11)["detail"]


def test_verifying_accepts_nothing_wrong(undisturbed: dict[str, bytes], proxy: Proxy, impatient: None) -> None:
    """An object of each kind, damaged each time that it is asked for, in one way or another: the error says which."""
    kinds = {re.sub(r"[0-9a-f]{8,}", "", key): key for key in sorted(undisturbed, key=lambda key: secrets.token_hex(4))}
    for key in kinds.values():
        fault = secrets.choice([wrong_answer, nul_answer, cut_answer])
        print(f"{key}: {fault.__name__}")
        proxy.no_faults()
        proxy.fault(fault, when=reads(key), times=ALWAYS)
        with pytest.raises(VerbatimError) as caught:
            checks.release([STORE])
        assert caught.value.exit_code == (1 if fault is cut_answer else 11), key
        assert proxy.faulted and (fault is cut_answer or key in str(caught.value)), key


def test_an_old_listing_hides_nothing_from_who_verifies(undisturbed: dict[str, bytes], proxy: Proxy) -> None:
    """What listings leave out is read all the same: the release names it."""
    straight = sorted(request.path for request in requests_of_verifying(proxy) if gets(request))
    proxy.fault(empty_listing, when=listings, times=ALWAYS)
    assert sorted(request.path for request in requests_of_verifying(proxy) if gets(request)) == straight
    assert proxy.faulted


def requests_of_verifying(proxy: Proxy) -> list[Request]:
    before = len(proxy.requests)
    checks.release([STORE])
    return proxy.requests[before:]
