"""What an extractor yields, and how much it may unpack."""

from typing import NamedTuple

from storage.errors import InputFault

MAX_MEMBER = 1 << 30  # bytes of one member of an archive, or of one row, unpacked
MAX_ARCHIVE = 16 << 30  # bytes of a compressed file, unpacked


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
