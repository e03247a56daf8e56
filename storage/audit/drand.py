"""drand's quicknet: a value every three seconds, signed by a group of which no minority can know or steer it.

    round r comes out at GENESIS + 3 (r − 1) seconds; its signature is the group's, a point of G1 of BLS12-381, over
    sha256(r as 8 bytes, big endian); its value is sha256(signature)

The chain's hash covers period, genesis, group and key, so none of them is ever asked for: they are pinned here, and a
server can only withhold a round, never invent one.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from storage.corpus.download import download_bytes
from storage.errors import InputFault, MissingObject

CHAIN = "52db9ba70e0cc0f6eaf7803dd07447a1f5477735fd3f661792ba94600c84e971"
PUBLIC_KEY = (
    "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c8c4b450b6a0a6c3ac6a5776a2d106451"
    "0d1fec758c921cc22b0e17e63aaf4bcb5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
)  # a point of G2, compressed
GENESIS = datetime.fromtimestamp(1692803367, UTC)
PERIOD = timedelta(seconds=3)
LATEST = timedelta(minutes=1)  # after a round is due, a server must have it
MAX_ANSWER = 4096
_SIGNATURE = re.compile(r"[0-9a-f]{96}\Z")


def time_of(number: int) -> datetime:
    """When a round comes out; rounds count from 1. InputFault for one that the calendar does not reach."""
    try:
        return GENESIS + PERIOD * (number - 1)
    except OverflowError:
        raise InputFault(f"round {number} of drand's quicknet comes out after the year 9999") from None


def round_from(moment: datetime) -> int:
    """The first round that comes out at this moment or later."""
    return max(1, -((GENESIS - moment) // PERIOD) + 1)


def value_of(signature: str) -> str:
    """The random value of a round's signature, 64 hex digits."""
    return hashlib.sha256(bytes.fromhex(signature)).hexdigest()


def fetch(address: str, number: int) -> str:
    """The signature of a round, 96 hex digits, from a drand server; not checked yet.

    Raises InputFault for an answer that is none, MissingObject where the server has no such round, VerbatimError.
    """
    url = f"{address.rstrip('/')}/{CHAIN}/public/{number}"
    try:
        answer = json.loads(_answer(url, time_of(number)))
        found, signature = answer["round"], answer["signature"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputFault(
            f"{url}: the answer is no round of drand",
            cause="another server's address",
            next_step="give the address of a drand server, such as https://api.drand.sh",
        ) from None
    for what, given, right in (
        ("round", found, found == number),
        ("signature", signature, isinstance(signature, str) and _SIGNATURE.match(signature)),
    ):
        if not right:
            raise InputFault(
                f"{url}: the answer's {what} is {str(given)[:100]!r}; expected round {number} and 96 hex digits",
                cause="the server is broken, or lies",
                next_step="ask another server for the round",
            )
    return str(signature)


def _answer(url: str, due: datetime) -> bytes:
    """What the server has of a round, which may come there some seconds after it is due."""
    while True:
        try:
            return download_bytes(url, MAX_ANSWER)
        except MissingObject:
            if not due <= datetime.now(UTC) < due + LATEST:
                raise
        time.sleep(PERIOD.total_seconds())


def check(number: int, signature: str) -> None:
    """InputFault unless this is the group's signature of the round."""
    if not _genuine(number, signature):
        raise InputFault(
            f"round {number} of drand's quicknet: {signature[:96]!r} is not the group's signature",
            cause="the server or a record is damaged, or someone invented the value",
            next_step="ask another server for the round",
        )


def check_together(rounds: Iterable[tuple[int, str]]) -> None:
    """Check many (round, signature) at once, eight times as fast as one by one; check() then knows the genuine ones.

    The sum of the signatures, each times a random factor that a forger cannot know, must be the group's for the sum of
    the rounds. Where one is not genuine nothing is remembered, and check() finds which.
    """
    from storage.audit import bls  # here and below: its import takes a second, which only draws by drand need

    new = [one for one in set(rounds) if one not in _GENUINE]
    points = [_point(signature) for _, signature in new]
    if len(new) < 2 or None in points:
        return
    factors = [1 + secrets.randbits(128) for _ in new]
    signed = bls.weighted([bls.hashed(_message(number)) for number, _ in new], factors)
    if bls.balanced(signed, bls.weighted(points, factors), PUBLIC_KEY):
        _GENUINE.update(new)


_GENUINE: set[tuple[int, str]] = set()  # a draw is read many times


def _genuine(number: int, signature: str) -> bool:
    from storage.audit import bls

    if (number, signature) in _GENUINE:
        return True
    point = _point(signature)
    if point is None or not bls.balanced(bls.hashed(_message(number)), point, PUBLIC_KEY):
        return False
    _GENUINE.add((number, signature))
    return True


def _point(signature: str) -> Any:
    from storage.audit import bls

    return bls.point(signature) if _SIGNATURE.match(signature) else None


def _message(number: int) -> bytes:
    """What the group signs for a round."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()
