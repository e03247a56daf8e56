"""The ledger: a header and one entry a step, each holding the digest of the one before.

    ledger/header.json      spec, mix, held-out set, trainer's key, initial state, code; its digest is the run id
    ledger/<step>.jsonl     a part: the entries from that step on, one canonical line each

A part is written by `create`, and that write is the fence between two writers: the loser reads the winner's part.
Training is deterministic, so an honest twin wrote the same bytes, and the loser goes on after them; other bytes are a
Divergence. Nothing in a ledger is ever rewritten.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

from kernels import canonical
from kernels.digest import digest
from model.spec import RunSpec
from storage.ahead import ahead
from storage.errors import Divergence, InputFault, LedgerFault, UsageError
from storage.records import Bits, Count, Digest, Record
from storage.store import Store

HEADER_KEY = "ledger/header.json"
MAX_HEADER = 1 << 20
MAX_PART = 8 << 20
MAX_ENTRY = 4096
FETCHED = 8  # parts at a time
_PART = re.compile(r"ledger/(\d{8})\.jsonl")


class Header(Record):
    """What the run is, before its first step. `code` and `lock` are declared; segment records say what really ran."""

    kind: Literal["header"] = "header"
    spec: dict[str, Any]
    mix_root: Digest
    held_out_root: Digest
    trainer: Digest  # Ed25519 public key
    initial_root: Digest
    code: Digest
    lock: Digest

    def digest(self) -> str:
        """The run id."""
        return digest(self.canonical(), "entry")

    def run_spec(self) -> RunSpec:
        """The spec, checked again; LedgerFault if it is not what a spec of this version would write."""
        try:
            spec = RunSpec.model_validate(self.spec)
        except ValueError as error:
            raise LedgerFault(f"{HEADER_KEY}: not a run spec of this version: {error}") from None
        if canonical.dumps(spec.canonical()) != canonical.dumps(self.spec):  # for Python, True is 1
            raise LedgerFault(f"{HEADER_KEY}: the spec leaves out fields that this version knows, or writes them oddly")
        return spec


class Entry(Record):
    """What one step did. Floats are the bits of float32; a step that was not finite has no loss, norm or gradient."""

    kind: Literal["step"] = "step"
    step: Count
    tokens: Count
    first_window: Count
    windows: Count
    lr: Bits
    loss: Bits | None
    z_loss: Bits | None
    grad_norm: Bits | None
    batch: Digest
    gradient: Digest | None
    state: Digest
    event: Literal["", "spike", "nonfinite", "cooldown"]
    clipped: bool
    previous: Digest

    def digest(self) -> str:
        """What the next entry holds as `previous`."""
        return digest(self.canonical(), "entry")


def part_key(step: int) -> str:
    """Key of the part whose first entry is `step`."""
    return f"ledger/{step:08d}.jsonl"


def first_step(key: str) -> int:
    """The step of the first entry of the part under that key."""
    return int(key[7:15])


def differing_fields(recorded: Entry, found: Entry) -> tuple[str, ...]:
    """Names of the fields in which two entries differ."""
    return tuple(name for name in Entry.model_fields if getattr(recorded, name) != getattr(found, name))


def trajectory_root(initial_root: str, state_roots: Iterable[str]) -> str:
    """The chain over state roots alone: it changes only if arithmetic or data do, not with keys, code or versions."""
    chain = digest(bytes.fromhex(initial_root), "trajectory")
    for state in state_roots:
        chain = digest(bytes.fromhex(chain) + bytes.fromhex(state), "trajectory")
    return chain


class Ledger:
    """A verified ledger: opening it reads the whole chain; LedgerFault says which entry is wrong, and how."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.header = Header.parse(store.read(HEADER_KEY, limit=MAX_HEADER), HEADER_KEY, LedgerFault)
        self.run_id = self.header.digest()
        self._entries: list[Entry] = []
        self._links = [self.run_id]
        self.parts = [key for key in store.list("ledger/") if key != HEADER_KEY]  # where the entries lie
        for entry in _read(store, self.parts):
            self._take(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, step: int) -> Entry:
        if not 0 <= step < len(self._entries):
            raise LedgerFault(f"the ledger has no entry of step {step}: it holds {len(self)} steps, from 0 on")
        return self._entries[step]

    @property
    def head(self) -> str:
        """Digest of the last entry; the run id before the first step."""
        return self._links[-1]

    def link(self, step: int) -> str:
        """What the entry of `step` must hold as `previous`: the digest of the entry before, or the run id."""
        return self._links[step]

    def state_root(self, step: int) -> str:
        """Root of state `step`, that is after `step` steps; LedgerFault if the ledger ends before."""
        if step > len(self):
            raise LedgerFault(
                f"the ledger ends after {len(self)} steps, but state {step} exists",
                cause="entries were cut off at the end of the ledger",
                next_step="restore the missing parts of ledger/",
            )
        return self[step - 1].state if step else self.header.initial_root

    def trajectory_root(self) -> str:
        """The chain over all state roots."""
        return trajectory_root(self.header.initial_root, (entry.state for entry in self))

    def record(self, entry: Entry) -> bool:
        """Append the entry (True), or compare it with the recorded one (False).

        Raises Divergence if the ledger, or a writer that was faster, holds another entry for this step.
        """
        if entry.step > len(self) or entry.previous != self.link(entry.step):
            raise UsageError(f"step {entry.step} does not follow the ledger's {len(self)} entries")
        if entry.step == len(self):
            line = entry.canonical() + b"\n"
            created = self._store.create(part_key(entry.step), line)
            self.parts.append(part_key(entry.step))
            if created:
                self._take(entry)
                return True
            for winner in _read(self._store, [part_key(entry.step)], entry.step):
                self._take(winner)
        check_same(self[entry.step], entry)
        return False

    def catch_up(self) -> None:
        """Take the entries that another writer added since this ledger was opened."""
        known = set(self.parts)
        parts = [key for key in self._store.list("ledger/") if key != HEADER_KEY and key not in known]
        for entry in _read(self._store, parts, len(self)):
            self._take(entry)
        self.parts += parts

    def _take(self, entry: Entry) -> None:
        """Append a read entry, if it is the next of the chain."""
        _check_order(entry.step, len(self), f"entry {entry.step}")
        if entry.previous != self.head:
            before = f"entry {entry.step - 1}" if entry.step else "the header"
            raise LedgerFault(
                f"entry {entry.step} follows {entry.previous}, but {before} has digest {self.head}",
                cause=f"{before} was changed after entry {entry.step} was written, or they belong to two runs",
                next_step="fetch the ledger again from its publisher",
            )
        self._entries.append(entry)
        self._links.append(entry.digest())


def check_same(recorded: Entry, found: Entry) -> None:
    """Raise Divergence, naming fields and both values, unless the two entries are equal."""
    if fields := differing_fields(recorded, found):
        values = ", ".join(f"{name} {getattr(found, name)} (recorded {getattr(recorded, name)})" for name in fields)
        raise Divergence(
            f"step {recorded.step} came out differently than the ledger records: entry {found.digest()}, "
            f"recorded {recorded.digest()}: {values}",
            cause="another code, a faulty machine, or a ledger that was not made by this spec and mix",
            next_step="verbatim doctor, then audit this step on another machine",
            step=recorded.step,
            fields=fields,
        )


def recorded_steps(store: Store) -> int:
    """How many steps the ledger holds, read from its last part alone: the chain is not verified."""
    parts = [key for key in store.list("ledger/") if _PART.fullmatch(key)]
    return _part_entries(parts[-1], _part(store, parts[-1]))[-1].step + 1 if parts else 0


def _read(store: Store, parts: list[str], expected: int = 0) -> Iterator[Entry]:
    """All entries of the parts in key order, from step `expected` on; the caller checks the chain.

    Some parts are fetched at a time: of a server each is a round trip, and a run has one for each step.
    """

    if odd := [key for key in parts if not _PART.fullmatch(key)]:
        raise LedgerFault(f"{odd[0]} is no part of a ledger")
    with ThreadPoolExecutor(FETCHED, thread_name_prefix="ledger") as pool:
        for key, data in zip(parts, ahead(pool, partial(_part, store), ((key,) for key in parts), FETCHED)):
            _check_order(first_step(key), expected, key)
            for entry in _part_entries(key, data):
                yield entry
                expected = entry.step + 1


def _part(store: Store, key: str) -> bytes:
    return store.read(key, limit=MAX_PART)


def _part_entries(key: str, data: bytes) -> list[Entry]:
    if not data.endswith(b"\n"):
        raise LedgerFault(f"{key} is cut off in the middle of an entry", cause="an incomplete copy")
    entries = []
    for number, line in enumerate(data[:-1].split(b"\n"), 1):
        if len(line) > MAX_ENTRY:
            raise LedgerFault(f"{key}, line {number}: {len(line)} bytes, an entry has at most {MAX_ENTRY}")
        entries.append(Entry.parse(line, f"{key}, line {number}", LedgerFault))
    _check_part(key, [entry.step for entry in entries])
    return entries


def _check_part(key: str, steps: list[int]) -> None:
    """LedgerFault, naming what is wrong, unless a part's steps count up from the one in its name."""
    first = first_step(key)
    due = list(range(first, first + len(steps)))
    if steps == due:
        return
    line, found, expected = next((i, s, d) for i, (s, d) in enumerate(zip(steps, due), 1) if s != d)
    where = f"{key}, line {line}: step {found} where step {expected} belongs"
    if sorted(steps) == due or line == 1:
        raise LedgerFault(f"{where}: entries were reordered, or the part was renamed")
    if found in due[: line - 1]:
        raise LedgerFault(f"{where}: step {found} is there twice")
    raise LedgerFault(f"{where}: entry {expected} is missing")


def _check_order(found: int, expected: int, where: str) -> None:
    if found < expected:
        raise LedgerFault(f"{where}: step {found} again, where step {expected} belongs: entries are there twice")
    if found > expected:
        last = f" to {found - 1}" if found - 1 > expected else ""
        raise LedgerFault(f"{where}: where step {expected} belongs: entry {expected}{last} is missing")


def create_header(store: Store, header: Header) -> None:
    """Write the header of a new run; InputFault if the store holds another run."""
    data = header.canonical()
    if not store.create(HEADER_KEY, data) and (other := store.read(HEADER_KEY, limit=MAX_HEADER)) != data:
        raise InputFault(
            f"{store.uri} holds run {digest(other, 'entry')}, not run {header.digest()}; nothing was overwritten",
            cause="another spec, mix, key or code began here",
            next_step="choose an empty folder for the new run",
        )
