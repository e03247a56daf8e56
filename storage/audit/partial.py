"""A step's units one by one, in an audit: one of them done twice, and what is finished kept for the next process.

    partial/<run>/<step>/<units>-<digest>    sums of the units done so far: a canonical JSON head, then int64 tensors

A replay that was stopped goes on from the last units kept. Sums take as much disk as memory, so they are written when
that costs a tenth of the time, at most; of a small model that is after every unit. They are this machine's own: nobody
else's sums are ever added.
"""

import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from kernels.digest import digest_of
from model.group import Alone, Tensors
from storage.audit.verdict import AuditProgress, Report
from storage.errors import InputFault, MachineFault
from storage.records import Count, Record
from storage.run import Run
from storage.store import Store, object_digest
from storage.team import Team

SHARE = 9  # a save may take one part of ten of the time
HEAD = 1 << 16  # bytes of the head, filled with spaces
PIECE = 64 << 20
_NAME = re.compile(r"(\d{5})-([0-9a-f]{64})")

Told = Callable[[int, int, int], None]


class Head(Record):
    """Which units are in the sums, and the sums of their losses."""

    kind: Literal["partial"] = "partial"
    units: list[Count]
    nll: Count
    lse2: Count


def unit_by_unit(run: Run, step: int, kept: Store | None, report: Report) -> Team:
    """Does one step of an audit, alone, and says how far it is."""
    began = time.monotonic()

    def told(done: int, fresh: int, of: int) -> None:
        left = (time.monotonic() - began) / fresh * (of - done)
        report(AuditProgress("unit", step, done, of, left))

    team = Team()
    team.group = Units(run.ledger.run_id, step, kept, told)
    return team


class Units(Alone):
    """The group of one process that audits a step: for one step alone. It changes no bit.

    kept: the store in which sums are kept, if any. told: units done, passes of this process, units of the step.
    Raises MachineFault where a unit, chosen at random, comes out differently when it is done again.
    """

    def __init__(
        self, run: str, step: int, kept: Store | None = None, told: Told = lambda done, fresh, of: None
    ) -> None:
        self.prefix, self.kept, self.told = f"partial/{run[:16]}/{step:08d}/", kept, told
        self.sums: Tensors = {}
        self.finished: list[int] = []
        self.before = (0, 0)  # nll, lse2 of units that another process did; what this one counted twice, negative
        self.losses: tuple[Any, Any, Any] = (0, 0, 0)  # nll, lse2 and flag as this process counts them
        self.fresh = 0  # passes over a unit in this process
        self.repeated: int | None = None  # the unit that is being done twice

    def batches(self, units: int) -> Iterator[Sequence[int]]:
        """A random unit, the same again, then the others; or those that are missing in what was kept."""
        self.count, self.saved, self.cost, self.source = units, time.monotonic(), 0.0, self._newest()
        if self.source:
            self._begin(self.source)
        else:
            self.repeated = secrets.randbelow(units)
            yield [self.repeated]
            first = self._outcome((0, 0))
            yield [self.repeated]
            self._compare(first, self._outcome(first[0]))
            self.finished, self.before, self.repeated = [self.repeated], (-first[0][0], -first[0][1]), None
            self._save()
        yield [unit for unit in range(units) if unit not in self.finished]

    def new_sums(self, backend: ModuleType, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        """The sums so far, to which the next batch is added; zeros for a unit that is done twice."""
        self.backend = backend
        if not self.sums:
            self.sums = super().new_sums(backend, shapes)
            if self.source:
                self._load(self.source)
        elif self.repeated is not None:
            for tensor in self.sums.values():
                tensor[...] = 0
        return self.sums

    def passed(self, unit: int, nll: Any, lse2: Any, flag: Any) -> None:
        """Count a unit that was added, and keep the sums if it is time."""
        self.losses = nll, lse2, flag
        if self.repeated is None:
            self.finished.append(unit)
            self.fresh += 1
            self.told(len(self.finished), self.fresh, self.count)
            self._save()

    def total(self, *values: int) -> list[int]:
        """The values of this process, nll, lse2 and the flag, with those of the units that another did."""
        nll, lse2, raised = values
        self._drop()
        return [nll + self.before[0], lse2 + self.before[1], raised]

    def _drop(self) -> None:
        """Delete what was kept of this step."""
        if self.kept:
            for key in self.kept.list(self.prefix):
                self.kept.delete(key)

    def _outcome(self, before: tuple[int, int]) -> tuple[tuple[int, int], Mapping[str, bytes]]:
        """(losses, digests of the sums) of the unit that was done alone."""
        nll, lse2, _ = self.losses
        return (int(nll) - before[0], int(lse2) - before[1]), self.backend.leaves_of(self.sums)

    def _compare(self, first: Any, again: Any) -> None:
        if first != again:
            names = [name for name in first[1] if first[1][name] != again[1][name]] or ["its losses"]
            raise MachineFault(
                f"unit {self.repeated} came out differently when it was done again: {', '.join(names[:5])}",
                cause="faulty memory or processor, or too little memory",
                next_step="audit on another machine; this one says nothing about the run",
            )

    def _save(self) -> None:
        """Keep the sums, unless that would take too much of the time, nothing is left to do, or all is void."""
        began, (nll, lse2, flag) = time.monotonic(), self.losses
        if not self.kept or began - self.saved < SHARE * self.cost or len(self.finished) == self.count or int(flag[0]):
            return
        head = Head(units=self.finished, nll=int(nll) + self.before[0], lse2=int(lse2) + self.before[1])
        pieces: list[bytes | memoryview] = [head.canonical().ljust(HEAD)]
        for name in sorted(self.sums):
            array = np.ascontiguousarray(self.backend.to_host(self.sums[name]), "<i8")
            pieces.append(memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        earlier = self.kept.list(self.prefix)
        self.kept.create(f"{self.prefix}{len(self.finished):05d}-{object_digest(pieces)}", pieces)
        for key in earlier:
            self.kept.delete(key)
        self.saved, self.cost = time.monotonic(), time.monotonic() - began

    def _newest(self) -> str | None:
        return max(self.kept.list(self.prefix), default=None) if self.kept else None

    def _begin(self, key: str) -> None:
        """What the head of `key` says; it is proven with the sums."""
        assert self.kept is not None
        head = Head.parse(self.kept.read_range(key, 0, HEAD).rstrip(b" "), key)
        self.finished, self.before = list(head.units), (head.nll, head.lse2)

    def _load(self, key: str) -> None:
        """The sums of `key`; InputFault if it is not what was kept."""
        assert self.kept is not None
        match = _NAME.fullmatch(key.removeprefix(self.prefix))
        pieces = itertools.chain([self.kept.read_range(key, 0, HEAD)], self._fill(key))
        if not match or digest_of(pieces, "object") != match[2]:
            raise InputFault(
                f"{self.kept.uri}: {key} is not what was kept there",
                cause="the disk damaged it",
                next_step=f"delete the folder {self.prefix} there, and audit again from the step's first unit",
            )

    def _fill(self, key: str) -> Iterator[bytes]:
        """Read the tensors to their places, piece by piece."""
        assert self.kept is not None
        start = HEAD
        for name in sorted(self.sums):
            flat = np.empty(tuple(self.sums[name].shape), np.int64).reshape(-1)
            for at in range(0, flat.nbytes, PIECE):
                data = self.kept.read_range(key, start + at, min(PIECE, flat.nbytes - at))
                flat[at // 8 : (at + len(data)) // 8] = np.frombuffer(data, "<i8")
                yield data
            self.sums[name][...] = self.backend.to_device(flat.reshape(tuple(self.sums[name].shape)))
            start += flat.nbytes
