"""Stage "write": one shard of windows out of the sorted runs, with its leaves and its index, created in the store.

This is the second half of the external sort: of every run the stretch of places is taken in which the shard's documents
lie, and the stretches are merged. A worker holds up to five copies of one shard: three of its documents' ids in Arrow's
memory while they are put in order, then its windows as a file, twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa

from storage.corpus.index_file import index_key, shard_index
from storage.corpus.keyed import key, permute
from storage.corpus.layout import Stream
from storage.corpus.manifest import Shard, StoredFile, stored
from storage.corpus.parts import Parts
from storage.corpus.read import texts_name
from storage.corpus.runs import in_order
from storage.corpus.spec import MixSpec
from storage.corpus.tokens import TokensPart
from storage.store import Store, create_same
from storage.windows import shard_objects, stored_shard

CHECKED = 4  # texts of every shard that are encoded by both libraries
CHECKED_CHARS = 200_000  # a longer text is not checked: the slow library would take seconds over it


@dataclass(frozen=True)
class Write:
    """Shard `number` of a part of a source, of `windows` windows.

    Its documents are those of the part at places low .. high-1, among which `held` (int64, ascending) are held out; the
    first of them is number `first` of the part and begins at token `first_token` of the part's stream.
    """

    parts: Parts
    store: Store
    spec: MixSpec
    source: str
    part: str
    number: int
    windows: int
    low: int
    high: int
    held: np.ndarray
    first: int
    first_token: int
    tokens: TokensPart

    @property
    def name(self) -> str:
        return f"shards/{self.source}/{self.part}/{self.number:05d}"

    @property
    def size(self) -> int:
        return self.windows * self.spec.window_tokens * 2  # bytes, or half of them

    @property
    def start(self) -> int:
        """The token of the part's stream with which the shard begins."""
        return self.number * self.spec.shard_windows * self.spec.window_tokens

    def finished(self) -> bool:
        """Whether it was written and is still there: InputFault if it is not as it was written."""
        if not self.parts.finished(self.name, self.tokens.digest):
            return False
        _, files = written(self.parts, self.name)
        present = all(self.store.list(key) == [key] for key in files)
        return present and all(self.store.read(key, file.digest) is not None for key, file in files.items())

    def __call__(self) -> None:
        """Raises MachineFault if two tokenizer libraries disagree, InputFault if the store holds something else."""
        table = self._documents()
        ids = table["ids"].chunk(0).flatten().to_numpy()
        ends = self.first_token + np.cumsum(np.diff(table["ids"].chunk(0).offsets.to_numpy()))
        self._check(table, ids, ends)
        begin = self.start - self.first_token
        count = self.windows * self.spec.window_tokens
        rows = ids[begin : begin + count].reshape(self.windows, self.spec.window_tokens)
        shard, objects, rows_at = shard_objects(f"windows/{self.source}/{self.part}", self.number, rows)
        files = stored_shard(objects, rows_at)
        key = index_key(self.source, self.part, self.number)
        objects[key] = shard_index(self._index(table, ends))
        files[key] = stored(objects[key])
        for name, data in objects.items():
            create_same(self.store, name, data)
        about = {
            "shard": shard.model_dump(mode="json"),
            "files": {k: f.model_dump(mode="json") for k, f in files.items()},
        }
        self.parts.write(self.name, about, (), self.tokens.digest)

    def _documents(self) -> pa.Table:
        """The documents in order, in one chunk."""
        table = pa.concat_tables(self._stretches()).combine_chunks()
        ordered = in_order(table, np.argsort(table["place"].to_numpy()))
        return pa.Table.from_batches(list(ordered)).combine_chunks()

    def _stretches(self) -> Iterator[pa.Table]:
        """Of each run the documents that are the shard's."""
        for name, digest in self.parts.about(runs_name(self.source))["runs"]:
            run, places = mapped(self.parts, name, digest)
            low, high = np.searchsorted(places, [self.low, self.high]).tolist()
            mine = np.isin(places[low:high], self.held, assume_unique=True, invert=self.part == "train")
            yield run.slice(low, high - low).filter(pa.array(mine))

    def _index(self, table: pa.Table, ends: np.ndarray) -> pa.Table:
        first = np.concatenate([[self.first_token], ends[:-1]])
        files = pa.array(self.parts.about(runs_name(self.source))["files"], pa.string())
        width = self.spec.window_tokens
        return pa.table(
            {
                "number": pa.array(self.first + np.arange(len(ends))),
                "file": files.take(table["file"].combine_chunks()),
                "member": table["member"],
                "position": table["position"],
                "first_token": pa.array(first),
                "tokens": pa.array(ends - first),
                "first_window": pa.array(first // width),
                "last_window": pa.array((ends - 1) // width),
            }
        )

    def _check(self, table: pa.Table, ids: np.ndarray, ends: np.ndarray) -> None:
        """Encode a keyed sample of the documents that begin here with the defining library as well."""
        begins = np.concatenate([[0], ends[:-1] - self.first_token])
        new = np.nonzero(begins + self.first_token >= self.start)[0]
        if not len(new):
            return
        secret = key(self.spec.seed, "tokenizer check", self.source, self.part, self.number)
        drawn = new[permute(secret, len(new), np.arange(min(CHECKED, len(new))))]
        for index in drawn.tolist():
            file, row = table["file"][index].as_py(), table["row"][index].as_py()
            text = self.parts.table(texts_name(self.source, file))["text"][row].as_py()
            if len(text) <= CHECKED_CHARS:
                self.tokens.open().check(text, ids[begins[index] : ends[index] - self.first_token])


def runs_name(source: str) -> str:
    """The piece that lists the runs and the files of a source."""
    return f"runs/{source}/all"


def written(parts: Parts, name: str) -> tuple[Shard, dict[str, StoredFile]]:
    """What a finished shard's record says."""
    about = parts.about(name)
    files = {key: StoredFile.model_validate(file) for key, file in about["files"].items()}
    return Shard.model_validate(about["shard"]), files


def shards(
    parts: Parts, store: Store, spec: MixSpec, source: str, streams: dict[str, Stream], tokens: TokensPart
) -> Iterator[Write]:
    """All shards of a source. A document over several shards is taken by each; the tail's are the last one's."""
    held = streams["held_out"].places
    for part, stream in streams.items():
        per_shard = spec.shard_windows * spec.window_tokens
        for number, start in enumerate(range(0, stream.windows * spec.window_tokens, per_shard)):
            stop = min(start + per_shard, stream.windows * spec.window_tokens)
            last = stop == stream.windows * spec.window_tokens
            first, after = np.searchsorted(stream.ends, [start, stop - 1], side="right").tolist()
            after = len(stream.ends) if last else after + 1
            low, high = int(stream.places[first]), int(stream.places[after - 1]) + 1
            a, b = np.searchsorted(held, [low, high]).tolist()
            before = int(stream.ends[first - 1]) if first else 0
            windows = (stop - start) // spec.window_tokens
            yield Write(parts, store, spec, source, part, number, windows, low, high, held[a:b], first, before, tokens)


@cache
def mapped(parts: Parts, name: str, digest: str) -> tuple[pa.Table, np.ndarray]:
    """(a run with this digest, its places): mapped once in each process."""
    table = parts.table(name)
    return table, table["place"].to_numpy()
