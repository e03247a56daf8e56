"""What an extractor yields, and how much it may unpack."""

from typing import NamedTuple

import numpy as np

from storage.errors import InputFault

MAX_MEMBER = 1 << 30  # bytes of one member of an archive, or of one row, unpacked
MAX_ARCHIVE = 16 << 30  # bytes of a compressed file, unpacked
MAX_NESTED = 200  # lists and objects within each other in a row or member of JSON; a deeper one is malformed

_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}"')


class Row(NamedTuple):
    """A document, or (`text` is None) a row that is skipped for `reason`."""

    member: str
    position: int
    text: str | None
    reason: str = ""


def check_size(what: str, size: int, limit: int) -> None:
    """InputFault if `what` unpacks to more than `limit` bytes."""
    if size > limit:
        raise InputFault(
            f"{what} unpacks to {size} bytes or more, at most {limit} are allowed",
            cause="a file made to fill the memory",
            next_step="leave it out of the recipe",
        )


def nested(data: bytes) -> bool:
    """Whether JSON nests deeper than MAX_NESTED. Where Python's parser gives up hangs on its version and its caller."""
    if data.count(b"[") + data.count(b"{") <= MAX_NESTED:
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(data.translate(None, _NO_MARKS), np.uint8)
    quotes = marks == ord('"')
    steps = np.where(np.isin(marks, list(b"[{")), 1, -1)
    steps[quotes | np.logical_xor.accumulate(quotes)] = 0  # what stands in strings
    return int(steps.cumsum().max(initial=0)) > MAX_NESTED
