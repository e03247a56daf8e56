"""The data stream a second time, from the text of its design alone: plain Python, one integer after another.

Nothing of `storage` or `kernels` is imported. From a mix spec (the JSON that stands in a published manifest), the
folder with the files that it pins (rows of .jsonl files, tar archives of texts, texts) and a tokenizer.json follow
every document, token, window, leaf and root, the windows of any part of the stream, and what each step of a run reads.

    Mix(spec, folder, tokenizer)        .sources[s].train and .held_out, .located(i), .window(i), .manifest(), .root()
    steps(schedule, seq_len)            (first window, windows) of every step
"""

import json
import tarfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

WORD = (1 << 64) - 1


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def digest(purpose: str, data: bytes) -> bytes:
    return bytes(blake3(data, derive_key_context=f"verbatim 2026 {purpose}").digest())


def stream_key(seed: int, *purpose: str | int) -> bytes:
    return digest("stream key", canonical([seed, *purpose]))


def scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


@lru_cache(maxsize=4096)
def round_keys(key: bytes) -> list[int]:
    drawn = b"".join(digest("stream round keys", key + bytes([i])) for i in range(4))
    return [int.from_bytes(drawn[at : at + 8], "little") for at in range(0, 128, 8)]


def permute(key: bytes, n: int, index: int) -> int:
    """Where `index` goes under the permutation of 0 .. n-1 that the key says."""
    half = 1
    while 4**half < n:
        half += 1
    while True:
        left, right = index >> half, index % (1 << half)
        for word in round_keys(key):
            left, right = right, left ^ scramble(right ^ word) % (1 << half)
        index = left << half | right
        if index < n:
            return index


def file_rows(path: Path, how: dict[str, Any]) -> Iterator[str | tuple[str]]:
    """Each row of a file in order: its text, or (the reason why it is skipped,)."""
    if how["kind"] == "rows":
        assert how["where"] is how["licences"] is how["languages"] is None, "filters are not sliced"
        lines = path.read_bytes().split(b"\n")
        yield from (json_row(line, how["text"]) for line in (lines if lines[-1] else lines[:-1]))
        return
    assert how["kind"] == "text"
    for name, content in members(path):
        if not any(fnmatchcase(name, glob) for glob in how["include"]) or any(
            fnmatchcase(name, glob) for glob in how["exclude"]
        ):
            yield ("not selected",)
        else:
            yield decoded(content)


def members(path: Path) -> list[tuple[str, bytes]]:
    if path.suffix != ".tar":
        return [(path.name, path.read_bytes())]
    with tarfile.open(path) as tar:
        found = [(one.name, tar.extractfile(one)) for one in tar if one.isfile()]
        return [(name, file.read() if file else b"") for name, file in sorted(found, key=lambda item: item[0])]


def decoded(content: bytes) -> str | tuple[str]:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return ("undecodable",)


def json_row(line: bytes, column: str) -> str | tuple[str]:
    read = decoded(line)
    if not isinstance(read, str):
        return read
    if not line.strip():
        return ("empty",)
    try:
        row = json.loads(read)
    except ValueError:
        return ("malformed",)
    text = row.get(column) if isinstance(row, dict) else 0
    return text if isinstance(text, str) else ("empty" if text is None else "malformed",)


@dataclass
class Part:
    """A token stream: its documents' canonical numbers in stream order, all ids, and the windows cut from it."""

    documents: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    windows: list[list[int]] = field(default_factory=list)

    def cut(self, size: int, count: int) -> None:
        self.windows = [self.ids[at : at + size] for at in range(0, count * size, size)]


@dataclass
class Source:
    name: str
    texts: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    train: Part = field(default_factory=Part)
    held_out: Part = field(default_factory=Part)


class Mix:
    """Sources in the spec's order; of texts with the same bytes, over all of them, the spec may keep the first only."""

    def __init__(self, spec: dict[str, Any], folder: Path, tokenizer: bytes) -> None:
        self.spec, self.seed, self.size = spec, spec["seed"], spec["seq_len"] + 1
        self._tokenizer_json, self._tokenizer = tokenizer, Tokenizer.from_str(tokenizer.decode())
        self._tokenizer.encode_special_tokens = True
        about = spec["tokenizer"]
        end_of_text = about["special"][0] if about["kind"] == "train" else about["end_of_text"]
        self.eot: int = self._tokenizer.token_to_id(end_of_text)  # type: ignore[assignment]
        self.vocab = self._tokenizer.get_vocab_size()
        self.id_bytes = 2 if self.vocab <= 65536 else 4
        seen: set[bytes] | None = set() if spec.get("duplicates") == "drop" else None
        self.sources = [self._collect(entry, folder, seen) for entry in spec["sources"]]
        ids = [
            [[*self._tokenizer.encode(text, add_special_tokens=False).ids, self.eot] for text in source.texts]
            for source in self.sources
        ]
        chosen = [self._chosen(source.texts, [len(one) for one in own]) for source, own in zip(self.sources, ids)]
        held = set[bytes]().union(*chosen)  # a text that is held out of one source is held out of all
        for source, own in zip(self.sources, ids):
            self._pack(source, own, held)
        self.counts = self._counts()

    def _collect(self, entry: dict[str, Any], folder: Path, seen: set[bytes] | None) -> Source:
        source = Source(entry["name"])
        for pin in sorted(entry["files"], key=lambda pin: PurePath(pin["path"]).name):
            path = folder / PurePath(pin["path"]).name
            assert sha256(path.read_bytes()).hexdigest() == pin["sha256"], f"{path} is another file than was pinned"
            for row in file_rows(path, pin["extract"]):
                checked = row if isinstance(row, tuple) else fit(row, seen)
                if isinstance(checked, str):
                    source.texts.append(checked)
                else:
                    source.skipped[checked[0]] = source.skipped.get(checked[0], 0) + 1
        return source

    def _pack(self, source: Source, ids: list[list[int]], held: set[bytes]) -> None:
        count, key = len(source.texts), stream_key(self.seed, "documents", source.name)
        order = [permute(key, count, p) for p in range(count)]
        for number in order:
            part = source.held_out if self._name(source.texts[number]) in held else source.train
            part.documents.append(number)
            part.ids += ids[number]
        source.held_out.cut(self.size, self.spec["held_out_windows"])
        source.train.cut(self.size, len(source.train.ids) // self.size)

    def _name(self, text: str) -> bytes:
        return blake3(normal(text).encode(), key=stream_key(self.seed, "held out")).digest()

    def _chosen(self, texts: list[str], lengths: list[int]) -> set[bytes]:
        wanted = self.spec["held_out_windows"] * self.size
        alike: dict[bytes, set[int]] = {}
        for number, text in enumerate(texts):
            alike.setdefault(self._name(text), set()).add(number)
        late = {name: 8 * max(lengths[n] for n in group) > wanted for name, group in alike.items()}
        chosen: set[bytes] = set()
        tokens = 0
        for name in sorted(alike, key=lambda name: (late[name], name)):
            if tokens < wanted:
                chosen.add(name)
                tokens += sum(lengths[n] for n in alike[name])
        return chosen

    def _counts(self) -> list[int]:
        if self.spec["proportions"] is not None:
            return [self.spec["proportions"][source.name] for source in self.sources]
        weights, block = [len(source.train.windows) for source in self.sources], self.spec["block"]
        counts = [weight * block // sum(weights) for weight in weights]
        rest = [weight * block % sum(weights) for weight in weights]
        while sum(counts) < block:
            first = rest.index(max(rest))
            counts[first], rest[first] = counts[first] + 1, -1
        return counts

    def located(self, i: int) -> tuple[int, int, int, int]:
        """(source, number, pass, position) of window i of the stream."""
        block, slot = divmod(i, sum(self.counts))
        drawn = slots(self.seed, tuple(self.counts), block)
        s = drawn[slot]
        number = block * self.counts[s] + drawn[:slot].count(s)
        windows = len(self.sources[s].train.windows)
        again, position = divmod(number, windows)
        if again:
            position = permute(stream_key(self.seed, "pass", self.sources[s].name, again), windows, position)
        return s, number, again, position

    def window(self, i: int) -> list[int]:
        s, _, _, position = self.located(i)
        return self.sources[s].train.windows[position]

    def raw(self, window: list[int]) -> bytes:
        return b"".join(token.to_bytes(self.id_bytes, "little") for token in window)

    def text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def leaf(self, window: list[int]) -> bytes:
        return digest("window", self.raw(window))

    def batch(self, first: int, count: int) -> str:
        return digest("batch", b"".join(self.leaf(self.window(i)) for i in range(first, first + count))).hex()

    def shards(self, part: Part) -> list[list[list[int]]]:
        each = self.spec["shard_windows"]
        return [part.windows[at : at + each] for at in range(0, len(part.windows), each)]

    def shard_digest(self, shard: list[list[int]]) -> bytes:
        return digest("shard", b"".join(self.leaf(window) for window in shard))

    def windows_root(self, part: Part) -> str:
        return digest("windows", b"".join(self.shard_digest(shard) for shard in self.shards(part))).hex()

    def held_out_root(self) -> str:
        roots = {source.name: self.windows_root(source.held_out) for source in self.sources}
        return digest("held out", canonical(roots)).hex()

    def second_pass(self, s: int) -> int:
        """The first window of the stream at which source s begins again."""
        i = 0
        while self.located(i)[:3:2] != (s, 1):
            i += 1
        return i

    def manifest(self) -> dict[str, Any]:
        """All that the mix root covers."""
        tokenizer = digest("object", self._tokenizer_json).hex()
        return {
            "format": "verbatim mix 1",
            "spec": self.spec,
            "tokenizer": {"digest": tokenizer, "vocab": self.vocab, "end_of_text": self.eot},
            "dtype": f"uint{8 * self.id_bytes}",
            "window_tokens": self.size,
            "sources": [self._source_entry(source) for source in self.sources],
            "counts": self.counts,
            "next_pass": {source.name: self.second_pass(s) for s, source in enumerate(self.sources)},
            "held_out_root": self.held_out_root(),
        }

    def root(self) -> str:
        return digest("mix", canonical(self.manifest())).hex()

    def _source_entry(self, source: Source) -> dict[str, Any]:
        return {
            "name": source.name,
            "text_bytes": sum(len(text.encode()) for text in source.texts),
            "skipped": source.skipped,
            "train": self._part_entry(source.train),
            "held_out": self._part_entry(source.held_out),
        }

    def _part_entry(self, part: Part) -> dict[str, Any]:
        shards = [{"windows": len(shard), "digest": self.shard_digest(shard).hex()} for shard in self.shards(part)]
        tail = len(part.ids) - len(part.windows) * self.size
        counts = {"documents": len(part.documents), "tokens": len(part.ids), "windows": len(part.windows)}
        return {**counts, "tail": tail, "shards": shards}


def normal(text: str) -> str:
    """Texts that differ only in Unicode form or white space are one text."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def fit(text: str, seen: set[bytes] | None) -> str | tuple[str]:
    """The text, or (why it is no document of the mix,)."""
    if not text.strip():
        return ("empty",)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        return ("undecodable",)
    if seen is not None and data in seen:
        return ("duplicate",)
    if seen is not None:
        seen.add(data)
    return text


@lru_cache(maxsize=64)
def slots(seed: int, counts: tuple[int, ...], block: int) -> list[int]:
    """The source of every slot of a block."""
    sources = [s for s, count in enumerate(counts) for _ in range(count)]
    key = stream_key(seed, "block", block)
    return [sources[permute(key, len(sources), slot)] for slot in range(len(sources))]


def steps(schedule: dict[str, Any], seq_len: int) -> Iterator[tuple[int, int]]:
    """(first window, number of windows) of every step of a run, one after another."""
    first = 0
    while first * seq_len < schedule["total_tokens"]:
        begun = [phase["windows"] for phase in schedule["phases"] if phase["from_tokens"] <= first * seq_len]
        yield first, begun[-1]
        first += begun[-1]
