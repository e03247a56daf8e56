"""Coverage: which steps were audited, and what so many audits of random steps prove."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from kernels import canonical
from kernels.digest import digest
from storage.audit.keys import Key
from storage.audit.states import DrawnStep

CONFIDENCE = (19, 20)  # 95 %
ANSWERED = ("attested", "confirmed")


@dataclass(frozen=True)
class Proven:
    """k audited of N steps at random; smallest: the least number of bad steps that would have been found at 95 %.

    on_word: how many of them were drawn on the trainer's word alone, so that for these "at random" is not proven.
    """

    audited: int
    on_word: int
    steps: int
    smallest: int | None


def detection(audited: int, steps: int, bad: int) -> float:
    """1 − (1 − k/N)^c: the probability that k audits of random steps meet one of c bad ones among N."""
    return 1 - (1 - audited / steps) ** bad


def proven(rows: list[DrawnStep], steps: int) -> Proven:
    """What the drawn steps that were audited prove of `steps` steps: a step of one's own choice proves itself only."""
    audited = {row.step for row in rows if row.state in ANSWERED}
    witnessed = {row.step for row in rows if row.state in ANSWERED and row.witnessed}
    return Proven(len(audited), len(audited - witnessed), steps, smallest_found(len(audited), steps))


def smallest_found(audited: int, steps: int) -> int | None:
    """The smallest c with detection(audited, steps, c) ≥ 95 %, exactly; None if nothing was audited.

    More bad steps than were left unaudited are found for certain.
    """
    if not audited:
        return None
    certain = steps - audited + 1
    if certain <= 1:
        return 1
    missed, of = CONFIDENCE[1] - CONFIDENCE[0], CONFIDENCE[1]
    bad = max(1, math.floor(math.log(missed / of) / math.log1p(-audited / steps)) - 1)  # a step or two too few
    while bad < certain and of * (steps - audited) ** bad > missed * steps**bad:
        bad += 1
    return min(bad, certain)


def first_for(key: Key, about: str, numbers: Collection[int]) -> int:
    """The one of some steps of a run, or units of a step, that this key should take: by hash of key and number.

    Every key prefers another, so many auditors spread without anyone who assigns them. What is hashed is the key's
    signature, which only its owner can make: whoever opens a step knows beacon and public keys, and must not know from
    them which units nobody will look at.
    """
    secret = key.sign(canonical.dumps({"about": about}), "next")
    return min(numbers, key=lambda number: digest(canonical.dumps({"number": number, "secret": secret}), "next"))
