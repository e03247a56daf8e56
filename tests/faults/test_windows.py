"""Faults of other loaders: epochs replayed, shards read again, ranks and workers that decide what comes next."""

import json
import os
import random
import string
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.store import LocalStore, MemoryStore
from storage.stream import Stream
from tests.faults.pages import BYTES, HELD_OUT, numbers, pages, texts
from tests.storage.corpus.mixes import pin, prepared, write_jsonl
from tests.storage.counting import Counting

ROOT = Path(__file__).resolve().parents[2]
Mixes = Callable[[int], Stream]

READ = """
import json, random, sys
from pathlib import Path
import numpy as np
from storage.store import LocalStore
from storage.stream import Stream
from tests.faults.pages import numbers
folder, first, stop, every, seed = sys.argv[1], *map(int, sys.argv[2:])
random.seed(seed)
stream = Stream.open(LocalStore(Path(folder)))
windows = np.concatenate([stream.windows(i, 1) for i in range(first, stop, every)])
print(json.dumps(numbers(stream.store, windows)))
"""


def read_elsewhere(stream: Stream, first: int, stop: int, every: int = 1, seed: int = 0) -> list[int]:
    """The pages that a fresh process reads, one window at a time, under a hash seed and a random seed of its own."""
    asked = [stream.store.uri.removeprefix("file://")]
    command = [sys.executable, "-c", READ, *asked, *map(str, (first, stop, every, seed))]
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def mixes(tmp_path_factory: pytest.TempPathFactory) -> Mixes:
    """The stream of a mix with so many training windows, 16 to a shard."""

    @cache
    def made(count: int) -> Stream:
        folder = tmp_path_factory.mktemp(f"of-{count}")
        store = LocalStore(folder / "mix")
        pages(folder, store, count, shard_windows=16)
        return Stream.open(store)

    return made


@pytest.mark.parametrize(("windows", "step"), [(64, 16 + 3), (500, 200)])
def test_a_resumed_reader_replays_the_first_epochs_order(mixes: Mixes, windows: int, step: int) -> None:
    """Position was restored but the epoch was not, so a permutation of epoch 0 came again; here it is in no state."""
    stream, batch = mixes(windows), 4
    whole = numbers(stream.store, stream.windows(0, 3 * windows))
    epochs = [whole[start : start + windows] for start in range(0, 3 * windows, windows)]
    assert step * batch > windows and (step * batch) % windows  # within the second epoch
    assert all(sorted(epoch) == sorted(set(epochs[0])) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read_elsewhere(stream, step * batch, 3 * windows, seed=step) == whole[step * batch :]


def test_a_restarted_reader_begins_at_the_first_shard_again(mixes: Mixes) -> None:
    """Shard and offset were not saved, and 40 % of a run was seen twice; here a window's number says its shard."""
    stream = mixes(64)
    seen = numbers(stream.store, stream.windows(0, 3 * 16))
    shards = [set(seen[start : start + 16]) for start in range(0, 48, 16)]
    assert len(set.union(*shards)) == 48  # disjoint, as the fault's shards were
    counted = Counting(stream.store)
    resumed = Stream(stream.manifest, counted)
    following = numbers(stream.store, resumed.windows(48, 16))
    assert not set(following) & set(seen) and len(set(following)) == 16
    assert set(counted.ranges) == {"windows/pages/train/00003.arrow"}
    assert set(counted.whole) == {"windows/pages/train/00003.leaves"}


LAYOUTS = [(nodes, ranks) for nodes, ranks in product(range(1, 13), repeat=2) if nodes * ranks <= 12]


@pytest.mark.parametrize("workers", [0, 1, 8])
def test_nodes_ranks_and_workers_change_the_order(mixes: Mixes, workers: int) -> None:
    """Shuffled after sharding, the order hung on the layout; here each reader asks for numbers and gets those."""
    stream = mixes(64)
    count = 2 * 64
    expected = numbers(stream.store, stream.windows(0, count))
    for nodes, ranks in LAYOUTS:
        world, gathered = nodes * ranks, [-1] * count
        readers = [(node * ranks + rank, Stream(stream.manifest, stream.store)) for node, rank in
                   product(range(nodes), range(ranks))]  # fmt: skip
        random.Random(world).shuffle(readers)
        for rank, reader in readers:
            mine = range(rank, count, world)
            gathered[rank::world] = numbers(stream.store, fetched(reader, mine, workers))
        assert gathered == expected, (nodes, ranks, workers)


def fetched(reader: Stream, mine: range, workers: int) -> np.ndarray:
    """The reader's windows, by that many threads that fetch ahead."""
    if not workers:
        return np.concatenate([reader.windows(i, 1) for i in mine])
    with ThreadPoolExecutor(workers) as pool:
        return np.concatenate(list(pool.map(lambda i: reader.windows(i, 1), mine)))


def test_ranks_with_seeds_of_their_own_leave_holes_and_doubles(mixes: Mixes) -> None:
    """The rank was in the seed, or the process's own generator drew; here three ranks read each page exactly once."""
    stream = mixes(64)
    read = [read_elsewhere(stream, rank, 64, every=3, seed=100 + rank) for rank in range(3)]
    held_out = numbers(stream.store, stream.held_out())
    assert sorted(sum(read, held_out)) == list(range(64 + HELD_OUT))


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_shards_that_do_not_divide_among_readers(mixes: Mixes, readers: int) -> None:
    """Where shards % readers != 0 a split went another way, and ranks got unequal counts; windows are dealt here."""
    stream = mixes(80)
    assert len(stream.manifest.mix.sources[0].train.shards) == 5
    whole = numbers(stream.store, stream.windows(0, 80))
    own = [numbers(stream.store, fetched(stream, range(reader, 80, readers), 0)) for reader in range(readers)]
    assert max(map(len, own)) - min(map(len, own)) <= 1
    assert [own[i % readers][i // readers] for i in range(80)] == whole  # the order is defined, not only the set
    assert len(set(whole)) == 80


def letters(folder: Path, seq_len: int, held_out_windows: int, documents: str) -> tuple[Stream, dict[str, Any]]:
    """A mix of documents of one letter each."""
    store = MemoryStore(os.urandom(8).hex())
    path = write_jsonl(folder / "letters.jsonl", list(documents))
    sources = [{"name": "letters", "files": [pin(path, kind="rows")]}]
    fields = {"sources": sources, "tokenizer": BYTES, "seq_len": seq_len, "held_out_windows": held_out_windows}
    prepared(folder, store, **fields)
    return Stream.open(store), fields


def test_no_end_of_text_between_documents(tmp_path: Path) -> None:
    """Ends were dropped in preparation, or only padded a tail: six documents are x end y end z end, twice."""
    stream, _ = letters(tmp_path, 5, 1, "abcdef")
    (train,), (held_out,) = texts(stream.store, stream.windows(0, 1)), texts(stream.store, stream.held_out())
    assert train[1::2] == held_out[1::2] == b"\0\0\0"
    assert sorted(train[::2] + held_out[::2]) == sorted(b"abcdef")
    (source,) = stream.manifest.mix.sources
    assert (source.train.documents, source.train.tokens, source.train.tail) == (3, 6, 0)


@pytest.mark.parametrize("template", ["<|endoftext|> $A", "$A <|endoftext|>", "<|endoftext|> $A <|endoftext|>"])
def test_a_tokenizer_that_adds_tokens_of_its_own(tmp_path: Path, template: str) -> None:
    """One appends an end and another does not: the one end after each text is ours, whatever the file says."""
    stream, fields = letters(tmp_path, 5, 1, "abcdef")
    document = json.loads(stream.store.read("tokenizer.json"))
    piece: dict[str, Any] = {"$A": {"Sequence": {"id": "A", "type_id": 0}}}
    special = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece.get(part, special) for part in template.split()],
        "pair": [piece["$A"], {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    about = {name: value for name, value in pin(path).items() if name in ("path", "size", "sha256")}
    tokenizer = {"kind": "pinned", **about}
    again = prepared(tmp_path, MemoryStore(os.urandom(8).hex()), **(fields | {"tokenizer": tokenizer}))[1]
    assert again.mix.sources == stream.manifest.mix.sources


def uneven(count: int) -> list[str]:
    """Documents of 1 to 97 bytes that all differ, each with a beginning of its own."""
    draw = random.Random(5)
    found = list(string.ascii_lowercase)
    found += [f"{i:03d}é" + "".join(draw.choices("abc 数\n", k=draw.randrange(40))) for i in range(count)]
    return [text for text in found if text.strip()]


@pytest.mark.parametrize("seq_len", [1, 7, 31, 97])
def test_windows_that_overlap_or_skip_a_token(tmp_path: Path, seq_len: int) -> None:
    """A window of L + 1 tokens confused its users, and samples began one off: the next one begins at L + 1, always.
    Read one after another they are whole documents, each once, and only the last one may be cut off."""
    documents = uneven(400)
    store = MemoryStore(os.urandom(8).hex())
    path = write_jsonl(tmp_path / "uneven.jsonl", documents)
    sources = [{"name": "uneven", "files": [pin(path, kind="rows")]}]
    wanted = 512 // (seq_len + 1)
    prepared(tmp_path, store, sources=sources, tokenizer=BYTES, seq_len=seq_len, held_out_windows=wanted)
    stream = Stream.open(store)
    (entry,) = stream.manifest.mix.sources
    found: list[bytes] = []
    for part, windows in ((entry.train, stream.windows(0, entry.train.windows)), (entry.held_out, stream.held_out())):
        assert windows.shape == (part.windows, seq_len + 1) and part.tokens == windows.size + part.tail
        *whole, rest = b"".join(texts(store, windows)).split(b"\0")
        found += whole
        assert not rest or any(text.encode().startswith(rest) for text in documents)
        assert len(whole) <= part.documents
    assert len(found) == len(set(found)) and set(found) <= {text.encode() for text in documents}
    assert entry.train.tail <= seq_len
    assert entry.train.tokens + entry.held_out.tokens == sum(len(text.encode()) + 1 for text in documents)
