"""What `make bench-corpus` gives to all: one recipe's documents, and one tokenizer.json, pinned.

The peers read the documents, already taken out of their files, from Parquet; ours takes them out itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.corpus.extract import rows
from storage.corpus.fetch import pinned_files, read_pinned
from storage.corpus.spec import MixSpec, PinnedTokenizer
from storage.stream import Stream
from tasks.references import CACHE

FILES = 8  # for the peer's two workers, who take them in turns
GROUP = 1000  # documents of a row group
SAMPLE = 2000  # documents whose ids are compared


@dataclass(frozen=True)
class Address:
    """Where a document was taken from."""

    source: str
    file: str
    member: str
    position: int


@dataclass(frozen=True)
class Texts:
    """Documents in Parquet files of about equal size; ends: int64[files], where each file's documents end."""

    folder: Path
    addresses: list[Address]
    ends: np.ndarray
    size: int  # bytes of UTF-8


def documents(spec: MixSpec) -> Iterator[tuple[Address, str]]:
    """Every document of the mix, in canonical order; without duplicates where the spec drops them."""
    met: set[str] = set()
    for source in spec.sources:
        for pin in pinned_files(source):
            for row in rows(pin.name, read_pinned(pin, CACHE), pin.extract, CACHE):
                if row.text is None or row.text in met:
                    continue
                if spec.duplicates == "drop":
                    met.add(row.text)
                yield Address(source.name, pin.name, row.member, row.position), row.text


def write_texts(spec: MixSpec, folder: Path) -> Texts:
    """The documents as the peers read them."""
    found = list(documents(spec))
    sizes = np.cumsum([len(text.encode()) for _, text in found])
    ends = np.searchsorted(sizes, sizes[-1] * np.arange(1, FILES + 1) // FILES, side="left") + 1
    folder.mkdir(parents=True)
    for number, (first, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist())):
        columns = {"id": [str(n) for n in range(first, end)], "text": [text for _, text in found[first:end]]}
        pq.write_table(pa.table(columns), folder / f"{number:02d}.parquet", row_group_size=GROUP)
    return Texts(folder, [address for address, _ in found], ends, int(sizes[-1]))


def pinned(spec: MixSpec, tokenizer: Path) -> MixSpec:
    """The same mix with a tokenizer that is given."""
    data = tokenizer.read_bytes()
    pin = PinnedTokenizer(kind="pinned", path=str(tokenizer), size=len(data), sha256=hashlib.sha256(data).hexdigest())
    return spec.model_copy(update={"tokenizer": pin})


def compare(texts: Texts, stream: Stream, peer: str, out: Path) -> int:
    """How many documents of a sample have the same ids in our windows and in what a peer left in `out`.

    AssertionError for one that has others. Documents in a tail are in no window, so are not compared.
    """
    end_of_text = [stream.manifest.mix.tokenizer.end_of_text] if peer == "tokenizers" else []
    wanted = set(np.random.default_rng(0).permutation(len(texts.addresses))[:SAMPLE].tolist())
    numbers = {texts.addresses[number]: number for number in wanted}
    compared = 0
    for address, ids in in_windows(stream, numbers):
        theirs = [*peer_ids(texts, peer, out, numbers[address]).tolist(), *end_of_text]
        assert ids.tolist() == theirs, f"{peer} gives other ids for {address}"
        compared += 1
    return compared


def in_windows(stream: Stream, wanted: dict[Address, int]) -> Iterator[tuple[Address, np.ndarray]]:
    """(address, ids) of those wanted documents that lie whole in windows."""
    sources = {source.name: number for number, source in enumerate(stream.manifest.mix.sources)}
    met: set[Address] = set()  # a document that lies in several shards stands in the index of each
    for key in (key for key in stream.manifest.files if key.startswith("docs/")):
        _, name, part, _ = key.split("/")
        windows = getattr(stream.manifest.mix.sources[sources[name]], part).windows
        for row in pq.read_table(pa.BufferReader(stream.store.read(key))).to_pylist():
            address = Address(name, row["file"], row["member"], row["position"])
            if address in wanted and address not in met and row["last_window"] < windows:
                met.add(address)
                yield address, _ids(stream, sources[name], part, row)


def _ids(stream: Stream, source: int, part: str, row: dict[str, int]) -> np.ndarray:
    """The ids of a document, by its row of the index."""
    rows = np.arange(row["first_window"], row["last_window"] + 1)
    start = row["first_token"] - row["first_window"] * stream.window_tokens
    return stream.rows(source, part, rows).reshape(-1)[start : start + row["tokens"]]


def peer_ids(texts: Texts, peer: str, out: Path, number: int) -> np.ndarray:
    """What a peer made of one document."""
    if peer == "tokenizers":
        return _between(out / "ids.u32", "<u4", np.fromfile(out / "ends.u64", "<u8"), number)
    file = int(np.searchsorted(texts.ends, number, side="right"))
    first = int(texts.ends[file - 1]) if file else 0
    data = out / "tokens" / f"{file:05d}_unshuffled.ds"
    ends = np.fromfile(f"{data}.index", "<u8")
    dtype = f"<u{data.stat().st_size // int(ends[-1])}"
    return _between(data, dtype, ends, number - first)


def _between(path: Path, dtype: str, ends: np.ndarray, number: int) -> np.ndarray:
    start = int(ends[number - 1]) if number else 0
    return np.memmap(path, dtype, mode="r")[start : int(ends[number])]
