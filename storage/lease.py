"""The lease of a run: who trains it now, so that nobody does the same work beside him.

    lease/<number>.json    owner and expiry; the newest counts. To renew or to take over is to create the next number

It fences nobody: whoever does not look, or whose clock is wrong, can train all the same. What keeps a run in one piece
is the ledger's `create` alone (ledger.py). A lease only saves double work, is in no digest and is not published.

An owner on this machine that is gone, or whose parents are, is seen at once; one elsewhere when its lease expires.
"""

from __future__ import annotations

import platform
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from storage import processes
from storage.errors import InputFault, Refused, StorageError, VerbatimError
from storage.records import Digest, Record, Text
from storage.store import Store

TERM = 120.0  # seconds from one renewal to the expiry
EVERY = 30.0  # seconds between renewals
MAX_LEASE = 1 << 16
ROUNDS = 100  # of wanting it: each that is lost is won by another, whom the next one meets
LAST = 10**8 // 2  # number that can be taken over: half a century of renewals before it, and after it
_NUMBERED = re.compile(r"lease/([0-9]{8})\.json")


class Holder(Record):
    """An owner of a run and until when, in seconds since 1970."""

    kind: Literal["lease"] = "lease"
    run: Digest
    host: Text
    machine: Text  # where the numbers of its processes mean something
    processes: list[processes.Process]  # that train, and its parents, without whom it ends
    token: Text
    expires: Annotated[int, Field(ge=0, lt=2**37)]

    def over(self, now: float) -> bool:
        """Whether it has expired, or this machine knows that its owner is gone."""
        here = self.machine == processes.machine() != ""
        return now >= self.expires or (here and any(processes.process(p.pid) != p for p in self.processes))

    def __str__(self) -> str:
        until = datetime.fromtimestamp(self.expires, UTC).strftime("%Y-%m-%d %H:%M:%S")
        host = self.host.replace("\n", "\\n")[:64]  # it may be anybody's
        return f"process {self.processes[0].pid if self.processes else '?'} on {host}, until {until} UTC"


class Lease:
    """This process's hold on a run. `lost` is who has it instead, once another took it over."""

    def __init__(self, store: Store, run: str, parents: int) -> None:
        self._store, self._run, self._number = store, run, 0
        self._machine, self._line = processes.machine(), processes.line(parents)
        self._token = secrets.token_hex(8)
        self._released, self._lock = threading.Event(), threading.Lock()
        self.lost: Holder | None = None

    def take(self) -> None:
        """Refused while another holds it; InputFault where there is no number left, or none can be had."""
        for _ in range(ROUNDS):
            newest = _newest(self._store)
            if newest >= LAST:
                raise InputFault(
                    f"{self._store.uri}: {_key(newest)} has the last number that a lease can have",
                    cause="it was put there by something else than training",
                    next_step="make sure that nobody trains this run, delete its folder lease/, and train again",
                )
            holder = _read(self._store, newest)
            if holder and not holder.over(time.time()):
                raise refused(self._store, holder)
            # Where another was faster the next round meets him. An owner who slept may have gone on meanwhile.
            if self._create(newest + 1) and _newest(self._store) == newest + 1:
                self._number = newest + 1
                self._tidy()
                return
        raise InputFault(
            f"{self._store.uri}: {ROUNDS} times no lease could be had: {_key(newest + 1)} is there, but no owner is",
            cause="a folder or a link has that name, put there by something else than training",
            next_step="make sure that nobody trains this run, delete its folder lease/, and train again",
        )

    def renew(self) -> None:
        """Hold it for another term, unless another has taken it over, or it was released."""
        with self._lock:
            if self._released.is_set():
                return
            if _newest(self._store) <= self._number and self._create(self._number + 1):
                self._number += 1
                self._tidy()
            elif (holder := _read(self._store, _newest(self._store))) and holder.token != self._token:
                self.lost = holder

    def keep(self) -> None:
        """Renew until released or lost; for a thread."""
        while not self.lost and not self._released.wait(EVERY):
            with suppress(VerbatimError):  # a disk that is full for a while, a network that is gone: it may come back
                self.renew()

    def release(self) -> None:
        """Let others have it."""
        self._released.set()
        with self._lock, suppress(StorageError):
            self._tidy(own=True)

    def _create(self, number: int) -> bool:
        expires = int(time.time() + TERM)
        holder = Holder(
            run=self._run,
            host=platform.node(),
            machine=self._machine,
            processes=self._line,
            token=self._token,
            expires=expires,
        )
        return self._store.create(_key(number), holder.canonical())

    def _tidy(self, own: bool = False) -> None:
        """Remove what came before our newest, and that too where asked."""
        for number in _numbers(self._store):
            if number < self._number or (own and number == self._number):
                self._store.delete(_key(number))


@contextmanager
def held(store: Store, run: str, parents: int) -> Iterator[Lease]:
    """Around the training of a run: Refused while another trains it. parents: how many generations of processes stand
    above this one without whom it ends."""
    lease = Lease(store, run, parents)
    lease.take()
    keeper = threading.Thread(target=lease.keep, daemon=True)
    keeper.start()
    try:
        yield lease
    finally:
        lease.release()


def refused(store: Store, holder: Holder) -> Refused:
    """What a second trainer is told."""
    return Refused(
        f"{store.uri}: this run is being trained by {holder}; it renews this as long as it lives",
        cause="the same training was started twice, or its machine died or lost the store a moment ago",
        next_step="wait for its end, or until then if it is gone (or delete the run's folder lease/, if you know that "
        "it is), and train again: it goes on from the newest checkpoint",
    )


def _key(number: int) -> str:
    return f"lease/{number:08d}.json"


def _numbers(store: Store) -> list[int]:
    return [int(match[1]) for match in map(_NUMBERED.fullmatch, store.list("lease/")) if match]


def _newest(store: Store) -> int:
    """The newest number, 0 where there is none."""
    return max(_numbers(store), default=0)


def _read(store: Store, number: int) -> Holder | None:
    """Its owner; None where it was released meanwhile, or says nothing that can be read: then nobody waits for it."""
    try:
        return Holder.parse(store.read(_key(number), limit=MAX_LEASE), _key(number)) if number else None
    except InputFault:
        return None
