"""Questions to the data of a run: what did a step see, which steps saw a document, where does a text occur?

Answered from a folder or a published store: of windows only those are read that the answer needs, by ranged reads, each
verified against its leaf. Read whole are the manifest, the tokenizer, the documents' index and the leaves of the shards
touched, the ledger's header and its last part: that it is one chain is not checked here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from model import schedule
from model.spec import RunSpec
from storage.corpus.index import Document, Index
from storage.corpus.manifest import KEY as MANIFEST
from storage.corpus.prepare import TOKENIZER
from storage.corpus.spec import PinnedTokenizer
from storage.corpus.tokens import Tokens
from storage.errors import InputFault, MissingObject, UsageError
from storage.ledger import HEADER_KEY, MAX_HEADER, Header, recorded_steps
from storage.mirrors import open_copies
from storage.store import Store, open_store
from storage.stream import Stream
from storage.windows import PARTS

MIX = "mix/"  # where a release and a run's folder hold the mix
MAX_WINDOW = 2**53  # of a stream without a run, which never ends


@dataclass(frozen=True)
class Reader:
    """The run that reads the mix: its id, its plan, and how many steps its ledger holds."""

    run_id: str
    spec: RunSpec
    recorded: int


@dataclass(frozen=True)
class Sighting:
    """A window of the stream that holds some of a document; the step that reads it, None without a run.

    done: the ledger holds that step, so it did see the document; else it is going to.
    """

    window: int
    passed: int
    step: int | None
    done: bool


@dataclass(frozen=True)
class Piece:
    """What a window holds of a document: `tokens` from the document's token `start` on, as text without end-of-text."""

    document: Document
    start: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A window of the stream: its row among its source's windows, and the documents in it in order."""

    window: int
    step: int | None
    source: str
    passed: int
    row: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Read:
    """A document as the windows hold it. missing: tokens at its end that fill no window, and so are in no step."""

    document: Document
    text: str
    missing: int


class Questions:
    """A mix to be asked about and, where there is one, the run that reads it."""

    def __init__(self, stream: Stream, reader: Reader | None = None) -> None:
        self.stream, self.reader = stream, reader
        self._indexes: dict[int, Index] = {}
        self._tokens: Tokens | None = None

    @classmethod
    def open(cls, address: str, mirrors: Sequence[str] = ()) -> Self:
        """Of a published run, a run's folder (mix/ beside run/), or a mix alone; UsageError if it is none of them.

        mirrors: addresses of further copies, of a published run; see open_copies().
        """
        stream, run = _open(address, mirrors)
        if run is None:
            return cls(stream)
        store, header = run
        return cls(stream, Reader(header.digest(), header.run_spec(), recorded_steps(store)))

    @property
    def tokens(self) -> Tokens:
        """The mix's tokenizer."""
        if self._tokens is None:
            mix = self.stream.manifest.mix
            spec = mix.spec.tokenizer
            end = spec.end_of_text if isinstance(spec, PinnedTokenizer) else spec.special[0]
            data = self.stream.store.read(self.stream.base + TOKENIZER, mix.tokenizer.digest)
            self._tokens = Tokens(data, mix.tokenizer.digest, end)
        return self._tokens

    def index(self, source: int) -> Index:
        """The documents of one source."""
        if source not in self._indexes:
            self._indexes[source] = Index(self.stream, source)
        return self._indexes[source]

    def step(self, step: int) -> list[Shown]:
        """The windows that a step reads, in order, with all that is in them."""
        if self.reader is None:
            raise UsageError(
                f"{self.stream.store.uri} holds a mix without a run: windows, but no steps",
                next_step="ask for a window (--window), or give a run's folder or a published run",
            )
        try:
            plan = schedule.plan(self.reader.spec, step)
        except IndexError as error:
            raise UsageError(str(error), next_step="ask for a step that the run has") from None
        return self.windows(plan.first_window, plan.windows)

    def window(self, window: int) -> list[Shown]:
        """One window of the stream, by its global index."""
        end = schedule.total_windows(self.reader.spec) if self.reader else MAX_WINDOW
        if not 0 <= window < end:
            whose = f"run {self.reader.spec.name!r} reads windows" if self.reader else "a stream has windows"
            raise UsageError(
                f"window {window} was asked for; {whose} 0 to {end - 1}", next_step="ask for a window among them"
            )
        return self.windows(window, 1)

    def windows(self, first: int, count: int) -> list[Shown]:
        """Windows first .. first+count-1 of the stream with the documents of which they hold any token."""
        ids, located = self.stream.windows(first, count), self.stream.locate(first, count)
        rows = list(zip(located.source.tolist(), located.position.tolist(), strict=True))
        documents = {
            source: self.index(source).in_rows("train", [row for s, row in rows if s == source])
            for source in dict.fromkeys(source for source, _ in rows)
        }
        return [
            Shown(
                first + place,
                self._step(first + place),
                self.stream.mixture.names[source],
                int(located.passes[place]),
                row,
                self._pieces(ids[place], source, row, documents[source][row]),
            )
            for place, (source, row) in enumerate(rows)
        ]

    def document(self, name: str) -> Read:
        """The document with this id, <source>/<part>/<number>, and its text; UsageError if there is none."""
        source, part, number = (*name.split("/"), "", "")[:3]
        names = self.stream.mixture.names
        known = source in names and part in PARTS and number.isascii() and number.isdigit() and len(number) < 16
        found = self.index(names.index(source)).document(part, int(number)) if known else None
        if found is None or name != found.id:
            counts = ", ".join(
                f"{entry.name}/{part}/0 to {getattr(entry, part).documents - 1}"
                for entry in self.stream.manifest.mix.sources
                for part in PARTS
            )
            raise UsageError(
                f"there is no document {name[:200]!r}; the mix has {counts}",
                next_step="take the id from the documents of a step (--step) or from a search (--search)",
            )
        return self._read(found)

    def sightings(self, documents: Sequence[Document]) -> dict[str, list[Sighting]]:
        """By id: every window of the run that holds a token of the document, over all passes, in the stream's order.

        Without a run: of the first pass alone. A held-out document is in none.
        """
        result: dict[str, list[Sighting]] = {document.id: [] for document in documents}
        wanted = {document.id: document for document in documents if document.part == "train"}
        for source, name in enumerate(self.stream.mixture.names):
            mine = [document for document in wanted.values() if document.source == name]
            rows = {document.id: self._rows(document, source) for document in mine}
            every = sorted({row for some in rows.values() for row in some})
            for passed, windows in self._passes(source, np.array(every, np.int64)):
                at = dict(zip(every, windows.tolist(), strict=True))
                for document in mine:
                    seen = [at[row] for row in rows[document.id] if at[row] >= 0]
                    result[document.id] += [self._sighting(window, passed) for window in seen]
        return {name: sorted(seen, key=lambda sighting: sighting.window) for name, seen in result.items()}

    def _passes(self, source: int, rows: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """(pass, global index of each row in it, -1 where the run has ended by then)."""
        mixture, passed = self.stream.mixture, 0
        end = schedule.total_windows(self.reader.spec) if self.reader else mixture.begins_pass(source, 1)
        while rows.size and mixture.begins_pass(source, passed) < end:
            windows = mixture.in_pass(source, rows, passed)
            yield passed, np.where(windows < end, windows, -1)
            passed += 1

    def _sighting(self, window: int, passed: int) -> Sighting:
        step, recorded = self._step(window), self.reader.recorded if self.reader else 0
        return Sighting(window, passed, step, step is not None and step < recorded)

    def _step(self, window: int) -> int | None:
        return schedule.step_of(self.reader.spec, window) if self.reader else None

    def _rows(self, document: Document, source: int) -> range:
        """The windows of its part that hold any of the document's tokens; the tail is in none."""
        width, entry = self.stream.window_tokens, self.stream.manifest.mix.sources[source]
        end = -(-(document.first_token + document.tokens) // width)
        return range(document.first_token // width, min(end, getattr(entry, document.part).windows))

    def _pieces(self, ids: np.ndarray, source: int, row: int, documents: list[Document]) -> tuple[Piece, ...]:
        """What a training window holds of each document; InputFault unless the index and the window agree."""
        base, width = row * len(ids), len(ids)
        pieces, ends = [], []
        for document in documents:
            start, stop = max(document.first_token - base, 0), document.first_token + document.tokens - base
            if stop <= width:
                ends.append(stop - 1)
            here = ids[start : min(stop, width)]
            text = self.tokens.text(here[:-1] if stop <= width else here)
            pieces.append(Piece(document, base + start - document.first_token, len(here), text))
        if sum(piece.tokens for piece in pieces) != width:
            raise self._disagree(source, "train", row, f"leaves out a part of window {row}")
        self._check_ends(ids, ends, f"window {row}", source, "train", row)
        return tuple(pieces)

    def _read(self, document: Document) -> Read:
        source = self.stream.mixture.names.index(document.source)
        rows = self._rows(document, source)
        ids = self.stream.rows(source, document.part, np.arange(rows.start, rows.stop)).reshape(-1)
        first = document.first_token - rows.start * self.stream.window_tokens
        ids = ids[first : first + document.tokens]
        missing = document.tokens - len(ids)
        ends = [] if missing else [len(ids) - 1]
        self._check_ends(ids, ends, f"document {document.id}", source, document.part, rows.start)
        return Read(document, self.tokens.text(ids if missing else ids[:-1]), missing)

    def _check_ends(self, ids: np.ndarray, ends: list[int], where: str, source: int, part: str, row: int) -> None:
        found = np.nonzero(ids == self.stream.manifest.mix.tokenizer.end_of_text)[0].tolist()
        if found != ends:
            how = f"has ends of documents at tokens {ends} of {where}, the windows at {found}"
            raise self._disagree(source, part, row, how)

    def _disagree(self, source: int, part: str, row: int, how: str) -> InputFault:
        """row: a window of the part whose shard's index is at fault."""
        key = self.index(source).key_of(part, row)
        return InputFault(
            f"{self.stream.store.uri}: {self.stream.base}{key} {how}"[:2000],
            cause="the index was made for another mix, or changed",
            next_step="do not rely on this index; prepare the mix again in an empty folder",
        )


def open_mix(address: str) -> Stream:
    """The mix of a published run, of a run's folder, or a mix alone; InputFault if it is not the one its run names."""
    return _open(address)[0]


def _open(address: str, mirrors: Sequence[str] = ()) -> tuple[Stream, tuple[Store, Header] | None]:
    """(the mix, store and header of the run that reads it, if there is one)."""
    store = open_copies([address, *mirrors]) if mirrors else open_store(address)
    run = next((s for s in (store, open_store(address.rstrip("/") + "/run")) if _has(s, HEADER_KEY)), None)
    base = next((base for base in (MIX, "") if _has(store, base + MANIFEST)), None)
    if base is None:
        raise UsageError(
            f"{store.uri} holds no mix: neither {MIX}{MANIFEST} nor {MANIFEST} is there",
            cause="a wrong address, a recipe that is not prepared yet, or run/ without the mix beside it",
            next_step="give a run's folder, such as runs/demo, or the address of a published run",
        )
    if run is None or not base:
        return Stream.open(store, base), None
    header = Header.parse(run.read(HEADER_KEY, limit=MAX_HEADER), HEADER_KEY)
    return Stream.open(store, base, root=header.mix_root), (run, header)


def _has(store: Store, key: str) -> bool:
    try:
        store.size(key)
    except MissingObject:
        return False
    return True
