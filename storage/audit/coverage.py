"""Coverage: which steps were audited, and what so many audits of random steps prove.

A draw by the head after n steps can meet a bad step among those n alone. Where k of them were drawn and audited, all of
c bad ones were missed with probability C(n − c, k) / C(n, k), which is at most (1 − k/n)^c: steps are drawn without
return, so this bound is safe, and exact for c = 1. Nobody knows where bad steps lie; the last ones of the run are those
that the fewest draws can meet. So of c bad steps among N a draw can meet c − (N − n) for sure, and wherever they lie,
one was met with at least

    1 − Π (1 − k/n)^(c − (N − n))  over the heads n         which is 1 − (1 − k/N)^c if every draw saw the whole run
"""

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

from kernels import canonical
from kernels.digest import digest
from storage.audit.keys import Key
from storage.audit.states import DrawnStep

CONFIDENCE = 0.95
EXAMPLES = (1, 10, 100, 1000)  # numbers of bad steps whose chance of being found is told
ANSWERED = ("attested", "confirmed")


@dataclass(frozen=True)
class Proven:
    """How many drawn steps were audited, of `steps` steps of the run.

    heads: (n, how many different steps were audited of those that draws by the head after n steps chose). unaudited:
    how many drawn steps were not, among which bad ones may be. on_word: how many were drawn on the trainer's word
    alone, so that for these "at random" is not proven.
    """

    audited: int
    unaudited: int
    on_word: int
    steps: int
    heads: tuple[tuple[int, int], ...]

    def detection(self, bad: int) -> float:
        """The least probability with which so many bad steps, wherever they lie, were met."""
        return -math.expm1(sum(_missed(k / n, bad - (self.steps - n)) for n, k in self.heads))

    @property
    def smallest(self) -> int | None:
        """The least number of bad steps that would have been met with 95 %; None if nothing was audited.

        More bad steps than were left unaudited are met for certain.
        """
        if not self.audited:
            return None
        certain = self.steps - self.audited + 1
        uncertain = range(1, certain)
        enough = CONFIDENCE - 1e-12  # nineteen audits of twenty steps meet one bad step with 95 %
        return 1 + bisect_left(uncertain, True, key=lambda bad: self.detection(bad) >= enough)


def _missed(share: float, bad: int) -> float:
    """The logarithm of the probability with which all of so many bad steps are missed."""
    if bad <= 0:
        return 0.0
    return bad * math.log1p(-share) if share < 1 else -math.inf


def proven(rows: Collection[DrawnStep], steps: int) -> Proven:
    """What the drawn steps that were audited prove of `steps` steps: a step of one's own choice proves itself only."""
    answered = [row for row in rows if row.state in ANSWERED]
    audited = {row.step for row in answered}
    heads = {n: len({row.step for row in answered if row.among == n}) for n in {row.among for row in answered}}
    return Proven(
        audited=len(audited),
        unaudited=len({row.step for row in rows} - audited),
        on_word=len(audited - {row.step for row in answered if row.witnessed}),
        steps=steps,
        heads=tuple(sorted(heads.items())),
    )


def first_for(key: Key, about: str, numbers: Collection[int]) -> int:
    """The one of some steps of a run, or units of a step, that this key should take: by hash of key and number.

    Every key prefers another, so many auditors spread without anyone who assigns them. What is hashed is the key's
    signature, which only its owner can make: whoever opens a step knows beacon and public keys, and must not know from
    them which units nobody will look at.
    """
    secret = key.sign(canonical.dumps({"about": about}), "next")
    return min(numbers, key=lambda number: digest(canonical.dumps({"number": number, "secret": secret}), "next"))
