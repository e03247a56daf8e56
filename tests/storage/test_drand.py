"""drand's quicknet: rounds and times, the group's signature, and a server that withholds, errs or lies."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from storage.audit import bls, drand
from storage.audit.beacon import LEAD, Quicknet, Value, check_value
from storage.audit.certificate import Beacon
from storage.corpus import download
from storage.errors import InputFault, MissingObject
from storage.provenance import PROJECT
from tests.file_server import FileServer, serving

ROUND = 1000  # a round of the public chain
SIGNATURE = "b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39"
VALUE = "fe290beca10872ef2fb164d2aa4442de4566183ec51c56ff3cd603d930e54fdd"
PATH = f"{drand.CHAIN}/public/{ROUND}"
GROUP = "f477d5c89f21a17c863a7f937c6a6d15859414d2be09cd448d4279af331c5d3e"


def serve(server: FileServer, **changes: object) -> None:
    answer = {"round": ROUND, "randomness": VALUE, "signature": SIGNATURE}
    server.files[PATH] = json.dumps(answer | changes).encode()


def test_the_chain_s_hash_covers_all_that_is_pinned() -> None:
    seconds = int(drand.PERIOD.total_seconds()).to_bytes(4, "big") + int(drand.GENESIS.timestamp()).to_bytes(8, "big")
    covered = seconds + bytes.fromhex(drand.PUBLIC_KEY) + bytes.fromhex(GROUP) + b"quicknet"
    assert hashlib.sha256(covered).hexdigest() == drand.CHAIN


def test_rounds_and_times() -> None:
    assert drand.time_of(1) == drand.GENESIS == datetime(2023, 8, 23, 15, 9, 27, tzinfo=UTC)
    assert drand.time_of(27946612) == datetime(2026, 4, 20, tzinfo=UTC)
    for number in (1, 2, 1000, 27946612):
        due = drand.time_of(number)
        assert drand.round_from(due) == number
        assert drand.round_from(due + timedelta(microseconds=1)) == number + 1
        assert drand.round_from(due - timedelta(seconds=2)) == number
    assert drand.round_from(drand.GENESIS - timedelta(days=9)) == 1


def test_a_statement_names_a_round_that_is_still_to_come() -> None:
    now = datetime(2026, 11, 29, 1, 30, 1, tzinfo=UTC)
    due = drand.time_of(Quicknet("http://unused").coming(now))
    assert now + LEAD <= due < now + LEAD + drand.PERIOD


def test_the_group_s_signature_is_taken_and_every_other_one_is_not() -> None:
    drand.check(ROUND, SIGNATURE)
    assert drand.value_of(SIGNATURE) == VALUE
    other_point = "a" + SIGNATURE[1:]  # the same x, the other y: a point of the curve, its sign flipped
    infinity = "c" + "0" * 95
    for number, signature in (
        (ROUND + 1, SIGNATURE),
        (ROUND, other_point),
        (ROUND, infinity),
        (ROUND, SIGNATURE[:-1] + "8"),
        (ROUND, "f" * 96),
        (ROUND, SIGNATURE[:-2]),
        (ROUND, SIGNATURE.upper()),
        (ROUND, ""),
    ):
        with pytest.raises(InputFault, match="not the group's signature"):
            drand.check(number, signature)


def test_a_value_needs_its_round_s_signature() -> None:
    beacon = Beacon(scheme="quicknet", round=ROUND, value=VALUE)
    check_value(Value(beacon, SIGNATURE))
    with pytest.raises(InputFault, match=f"has value {VALUE}, the record says {'0' * 64}"):
        check_value(Value(beacon.model_copy(update={"value": "0" * 64}), SIGNATURE))
    with pytest.raises(InputFault, match="not the group's signature"):
        check_value(Value(beacon.model_copy(update={"round": ROUND - 1}), SIGNATURE))
    with pytest.raises(InputFault, match="no beacon scheme is called 'dice'"):
        check_value(Value(beacon.model_copy(update={"scheme": "dice"}), SIGNATURE))


def test_a_round_from_a_server() -> None:
    with serving() as server:
        serve(server)
        value = Quicknet(server.url + "/").fetch(ROUND)
        check_value(value)
        assert value == Value(Beacon(scheme="quicknet", round=ROUND, value=VALUE), SIGNATURE)
        assert [asked.path for asked in server.asked] == [PATH]


@pytest.mark.parametrize(
    "changes", [{"round": ROUND - 1}, {"signature": SIGNATURE[:-2]}, {"signature": None}, {"signature": "\x1b[2J" * 24}]
)
def test_a_server_that_answers_another_round_or_no_signature(changes: dict[str, object]) -> None:
    with serving() as server:
        serve(server, **changes)
        with pytest.raises(InputFault, match=f"expected round {ROUND}"):
            Quicknet(server.url).fetch(ROUND)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 4000, b'{"round":' + b"9" * 4000 + b"}"])
def test_a_server_of_something_else(data: bytes) -> None:
    with serving() as server:
        server.files[PATH] = data
        with pytest.raises(InputFault, match="no round of drand"):
            Quicknet(server.url).fetch(ROUND)


def test_a_server_that_sends_too_much_or_has_no_such_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with serving() as server:
        server.files[PATH] = b" " * 5000
        with pytest.raises(InputFault, match="at most 4096"):
            Quicknet(server.url).fetch(ROUND)
        with pytest.raises(MissingObject):
            Quicknet(server.url).fetch(ROUND + 1)


def test_a_genuine_signature_of_another_round_does_not_pass_for_this_one() -> None:
    with serving() as server:
        server.files[f"{drand.CHAIN}/public/{ROUND + 1}"] = json.dumps(
            {"round": ROUND + 1, "signature": SIGNATURE}
        ).encode()
        value = Quicknet(server.url).fetch(ROUND + 1)
        with pytest.raises(InputFault, match="not the group's signature"):
            check_value(value)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """A group whose secret we know, in the place of the public one: signs any round."""
    from py_ecc.bls.point_compression import compress_G1, compress_G2  # not before `bls`, which knows how to import it
    from py_ecc.optimized_bls12_381 import G2, multiply

    secret = 0x5EC2E7
    halves = compress_G2(multiply(G2, secret))
    monkeypatch.setattr(drand, "PUBLIC_KEY", f"{halves[0]:096x}{halves[1]:096x}")
    monkeypatch.setattr(drand, "_GENUINE", set())
    return lambda number: f"{compress_G1(multiply(bls.hashed(drand._message(number)), secret)):096x}"


def test_many_rounds_are_checked_at_once(group: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [(number, group(number)) for number in range(1, 6)]
    drand.check_together(rounds)
    monkeypatch.setattr(bls, "balanced", None)  # nothing is left to be computed
    for number, signature in rounds:
        drand.check(number, signature)


@pytest.mark.parametrize("wrong", ["of another round", "of another group", "none"])
def test_one_wrong_signature_among_many_is_found(group: Callable[[int], str], wrong: str) -> None:
    rounds = {number: group(number) for number in range(1, 4)}
    rounds[2] = {"of another round": rounds[3], "of another group": SIGNATURE, "none": "0" * 96}[wrong]
    drand.check_together(rounds.items())
    drand.check(1, rounds[1])
    drand.check(3, rounds[3])
    with pytest.raises(InputFault, match="round 2 of drand's quicknet"):
        drand.check(2, rounds[2])


def test_two_wrong_signatures_do_not_make_up_for_each_other(group: Callable[[int], str]) -> None:
    """Their sum is right; without random factors both would pass."""
    drand.check_together([(1, group(2)), (2, group(1))])
    for number in (1, 2):
        with pytest.raises(InputFault):
            drand.check(number, group(3 - number))


def test_checking_a_signature_leaves_the_limit_of_recursion_as_it_is() -> None:
    """py_ecc raises it; with that, JSON nested 100,000 deep would overflow the stack instead of being refused."""
    code = (
        "import sys; before = sys.getrecursionlimit(); from storage.audit import bls; "
        "assert sys.getrecursionlimit() == before, sys.getrecursionlimit()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT)
