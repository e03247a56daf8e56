"""Faults of other corpora: weights that run past a source's end, numbers that overflow, places that change a byte."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.digest import digest
from storage.corpus.keyed import key
from storage.corpus.manifest import Manifest, Mix, StoredFile
from storage.corpus.mixture import Mixture
from storage.errors import UsageError
from storage.store import MemoryStore, object_digest
from storage.stream import Stream
from storage.windows import leaf
from tests.faults.pages import BYTES, HELD_OUT, numbers, page, pages
from tests.storage.corpus.mixes import pin, prepared, write_jsonl
from tests.storage.corpus.test_keyed import slow_permute

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 65_536  # the largest


def store() -> MemoryStore:
    """A fresh store."""
    return MemoryStore(os.urandom(8).hex())


@pytest.fixture(scope="module")
def extreme(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    """3 windows of "tiny" and 4,000 of "huge", one of the former to 65,535 of the latter."""
    folder, target = tmp_path_factory.mktemp("extreme"), store()
    sources = []
    for name, first, count in (("tiny", 900_000, 3), ("huge", 0, 4000)):
        path = write_jsonl(folder / f"{name}.jsonl", [page(first + i) for i in range(count + HELD_OUT)])
        sources.append({"name": name, "files": [pin(path, kind="rows")]})
    proportions = {"tiny": 1, "huge": BLOCK - 1}
    fields: dict[str, Any] = {"sources": sources, "block": None, "proportions": proportions}
    prepared(folder, target, held_out_windows=HELD_OUT, tokenizer=BYTES, **fields)
    return Stream.open(target)


def test_weights_of_1_to_65535_run_past_the_small_source(extreme: Stream) -> None:
    """A blend of 0.001 and 0.999 ended in an IndexError; here a source that is used up begins its next pass."""
    assert (extreme.mixture.windows, extreme.mixture.counts) == ((3, 4000), (1, BLOCK - 1))
    blocks = 8
    read: list[list[np.ndarray]] = [[], []]  # of each source, pass * its windows + position
    for block in range(blocks):
        where = extreme.locate(block * BLOCK, BLOCK)
        for source, windows in enumerate(extreme.mixture.windows):
            mine = where.source == source
            assert where.position[mine].max() < windows
            read[source].append(where.passes[mine] * windows + where.position[mine])
    tiny, huge = (np.concatenate(rows) for rows in read)
    assert (tiny // 3).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert sorted(tiny[:6].tolist()) == list(range(6)) and len(set(tiny.tolist())) == blocks
    passes = -(-blocks * (BLOCK - 1) // 4000)
    expected = [4000] * (passes - 1) + [blocks * (BLOCK - 1) - 4000 * (passes - 1)]
    assert np.bincount(huge // 4000).tolist() == expected  # so often each pass, to the window
    assert len(np.unique(huge)) == len(huge) == blocks * (BLOCK - 1)  # no window twice in one pass


def test_the_windows_around_the_end_of_a_used_up_source(extreme: Stream) -> None:
    """The exact windows: all of the small source, then all of it again in another order, and so on."""
    of_tiny = [int(extreme.mixture.find(0, np.array([number]))[0]) for number in range(9)]
    assert [window // BLOCK for window in of_tiny] == list(range(9))
    assert extreme.manifest.mix.next_pass == {"tiny": of_tiny[3], "huge": extreme.mixture.begins_pass(1, 1)}
    read = [numbers(extreme.store, extreme.windows(window - 1, 3))[1] for window in of_tiny]
    held_out = numbers(extreme.store, extreme.held_out())[:HELD_OUT]
    expected = set(range(900_000, 900_000 + 3 + HELD_OUT)) - set(held_out)
    assert all(set(read[start : start + 3]) == expected for start in (0, 3, 6))
    assert len({tuple(read[start : start + 3]) for start in (0, 3, 6)}) > 1
    assert [extreme.mixture.begins_pass(0, passed) for passed in (1, 2)] == [of_tiny[3], of_tiny[6]]


def test_a_weight_that_rounds_to_nothing(tmp_path: Path) -> None:
    """A source of one in 65,536 must not vanish: its share of a block is one window, or the recipe is refused."""
    sources = []
    for name, first, count in (("tiny", 900_000, 1), ("huge", 0, 400)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [page(first + i) for i in range(count + HELD_OUT)])
        sources.append({"name": name, "files": [pin(path, kind="rows")]})
    fields: dict[str, Any] = {"sources": sources, "held_out_windows": HELD_OUT, "tokenizer": BYTES}
    target = store()
    with pytest.raises(UsageError, match="source tiny has 1 of 401 windows: none of a block of 200"):
        prepared(tmp_path, target, block=200, **fields)
    assert target.list() == []
    assert prepared(tmp_path, store(), block=201, **fields)[1].mix.counts == (1, 200)


def vocabulary(folder: Path, size: int, end: str) -> dict[str, Any]:
    """A pinned tokenizer with `size` ids; the last is that of "xy", or that of <eot> where it ends texts."""
    first = store()
    pages(folder / "bytes", first, 4)
    file = json.loads(first.read("tokenizer.json"))
    file["model"]["vocab"] |= {f"Ġunused{i}": i for i in range(257, size - 1)}
    if end == "<eot>":
        file["added_tokens"].append(file["added_tokens"][0] | {"id": size - 1, "content": end})
    else:
        file["model"]["vocab"]["xy"] = size - 1
        file["model"]["merges"] = [["x", "y"]]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    about = {name: value for name, value in pin(path).items() if name in ("path", "size", "sha256")}
    return {"kind": "pinned", "end_of_text": end, **about}


@pytest.mark.parametrize("end", ["<|endoftext|>", "<eot>"])
@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_an_id_that_does_not_fit_16_bits(tmp_path: Path, size: int, dtype: str, end: str) -> None:
    """65,537 ids in uint16 wrap to id 0 in silence: the last id is read back, from a word or as the end of a text."""
    path = write_jsonl(tmp_path / "own.jsonl", [f"{i:03d}xy" for i in range(200)])
    target = store()
    fields: dict[str, Any] = {"sources": [{"name": "rows", "files": [pin(path, kind="rows")]}]}
    _, manifest = prepared(tmp_path, target, tokenizer=vocabulary(tmp_path, size, end), seq_len=9, **fields)
    stream = Stream.open(target)
    assert (manifest.mix.dtype, manifest.mix.tokenizer.vocab) == (dtype, size)
    windows = stream.windows(0, sum(stream.mixture.windows))
    assert (windows.dtype, stream.dtype) == (np.dtype(dtype), np.dtype(dtype))
    last = int((windows == size - 1).sum())
    ends = int((windows == manifest.mix.tokenizer.end_of_text).sum())
    assert windows.max() == size - 1 and windows.size // 6 - 1 <= last <= windows.size // 5 + 1
    assert manifest.mix.tokenizer.end_of_text == (size - 1 if end == "<eot>" else 0)
    assert last == ends if end == "<eot>" else 0 <= last - ends <= 1


def far(mixture: Mixture, index: int, drawn: list[int]) -> tuple[int, int, int, int]:
    """(source, number, pass, position) of a window in Python's integers; `drawn`: its block's permutation."""
    block, slot = divmod(index, mixture.block)
    ends = np.cumsum(mixture.counts).tolist()

    def source_of(one: int) -> int:
        return next(s for s, end in enumerate(ends) if one < end)

    source = source_of(drawn[slot])
    number = block * mixture.counts[source] + sum(source_of(one) == source for one in drawn[:slot])
    passed, position = divmod(number, mixture.windows[source])
    if passed:
        secret = key(mixture.seed, "pass", mixture.names[source], passed)
        position = slow_permute(secret, mixture.windows[source], position)
    return source, number, passed, position


MANY = Mixture(seed=3, names=("large", "small", "one"), windows=(110_000_000, 2**31 + 5, 1), counts=(4000, 95, 1))


@pytest.mark.parametrize("block", [2**31 // 4000 + 1, 10**9, 2**53 // 4000 + 1, 2**62 // 4096])
def test_numbers_of_windows_beyond_32_and_53_bits(block: int) -> None:
    """Token offsets in 32 bits wrapped, others went through a float: every number against Python's own integers."""
    first = block * MANY.block
    drawn = [slow_permute(key(MANY.seed, "block", block), MANY.block, slot) for slot in range(MANY.block)]
    slots = [0, 1, 2, 1000, 2047, 4094, 4095]
    slots += [*[i for i, one in enumerate(drawn) if one >= 4000][:8], drawn.index(4095)]
    index = first + np.array(slots)
    found = MANY.locate(index)
    rows = zip(
        found.source.tolist(), found.number.tolist(), found.passes.tolist(), found.position.tolist(), strict=True
    )
    assert list(rows) == [far(MANY, first + slot, drawn) for slot in slots]
    assert set(found.source.tolist()) == {0, 1, 2}
    for i, source in enumerate(found.source.tolist()):
        assert MANY.find(source, found.number[i : i + 1]).tolist() == [first + slots[i]]
        again = MANY.in_pass(source, found.position[i : i + 1], int(found.passes[i]))
        assert again.tolist() == [first + slots[i]]


def test_a_billion_of_the_largest_blocks() -> None:
    """Seed and number alone say a window 6.5 * 10^13 windows into the stream, and lead back from it."""
    mixture = Mixture(seed=3, names=("a", "b"), windows=(110_000_000, 3), counts=(BLOCK - 1, 1))
    index = 10**9 * BLOCK + np.arange(BLOCK)
    where = mixture.locate(index)
    own = where.source == 0
    assert where.number[own].tolist() == list(range(10**9 * (BLOCK - 1), (10**9 + 1) * (BLOCK - 1)))
    assert where.number[~own].tolist() == [10**9] and where.passes[~own].tolist() == [10**9 // 3]
    assert set(where.passes[own].tolist()) == {10**9 * (BLOCK - 1) // 110_000_000}
    assert 0 <= where.position.min() and len(set(where.position[own].tolist())) == BLOCK - 1
    passed = int(where.passes[own][0])
    assert mixture.in_pass(0, where.position[own], passed).tolist() == index[own].tolist()
    assert mixture.begins_pass(0, passed) <= index[0] < mixture.begins_pass(0, passed + 1)


WINDOWS, TOKENS, SHARD = 110_000_000, 4_097, 1 << 20
ROWS = [0, 2**31 // (2 * TOKENS), 2**31 // (2 * TOKENS) + 1, 2**32 // (2 * TOKENS) + 1, WINDOWS % SHARD - 1]


class Vast(MemoryStore):
    """A store whose window files, of up to 8.6 GB, are made where they are read: row r holds r, r + 1, … modulo 257."""

    rows_at = 1_000

    def read_range(self, key: str, start: int, length: int) -> bytes:
        row, within = divmod(start - self.rows_at, 2 * TOKENS)
        assert key == "windows/pages/train/00104.arrow" and within == 0 and length == 2 * TOKENS
        return vast_row(row).tobytes()


def vast_row(row: int) -> np.ndarray:
    return ((row + np.arange(TOKENS)) % 257).astype("<u2")


def vast(folder: Path) -> Stream:
    """110 million windows of 4,097 tokens in 105 shards, of which the last has leaves."""
    manifest = pages(folder, store(), 4, block=16)
    mix = manifest.mix.model_dump(mode="json")
    leaves = bytearray(32 * (WINDOWS % SHARD))
    for row in ROWS:
        leaves[32 * row : 32 * row + 32] = leaf(vast_row(row).tobytes())
    sizes = [SHARD] * (WINDOWS // SHARD) + [WINDOWS % SHARD]
    shards = [{"windows": size, "digest": digest(bytes(leaves), "shard")} for size in sizes]
    mix["spec"] |= {"seq_len": TOKENS - 1, "shard_windows": SHARD}
    mix["window_tokens"] = TOKENS
    source = mix["sources"][0]
    source["train"] |= {"windows": WINDOWS, "tokens": WINDOWS * TOKENS, "tail": 0, "shards": shards}
    held_out = [{"windows": HELD_OUT, "digest": "0" * 64}]
    source["held_out"] |= {"tokens": HELD_OUT * TOKENS, "tail": 0, "shards": held_out}
    target = Vast(os.urandom(8).hex())
    target.create("windows/pages/train/00104.leaves", bytes(leaves))
    size = target.rows_at + 2 * TOKENS * (WINDOWS % SHARD)
    file = StoredFile(digest="0" * 64, size=size, rows_at=target.rows_at)
    known = Manifest.of(Mix.model_validate(mix), {"windows/pages/train/00104.arrow": file})
    assert Manifest.model_validate(json.loads(known.to_bytes())) == known
    return Stream(known, target)


def test_a_token_beyond_32_bits_of_its_file_and_of_its_source(tmp_path: Path) -> None:
    """110 million windows of 4,097 tokens are 4.5 * 10^11 tokens, and a shard of them passes 2^31 and 2^32 bytes."""
    stream = vast(tmp_path)
    assert stream.manifest.mix.sources[0].train.tokens == 450_670_000_000
    for row in ROWS:
        window = WINDOWS - WINDOWS % SHARD + row
        where = stream.locate(window, 1)
        assert (where.position.tolist(), where.passes.tolist()) == ([window], [0])
        assert stream.windows(window, 1).tolist() == [vast_row(row).tolist()]
    assert stream.locate(WINDOWS, 1).passes.tolist() == [1]  # and the stream goes on behind its end
    assert stream.manifest.mix.spec.shard_windows * TOKENS * 2 > 2**32


ELSEWHERE = """
import json, sys
from pathlib import Path
from storage.store import MemoryStore, object_digest
from tests.storage.corpus.mixes import prepared
store = MemoryStore("elsewhere")
prepared(Path(sys.argv[1]), store)
print(json.dumps({key: object_digest(store.read(key)) for key in store.list()}))
"""
PLACES = [
    {"PYTHONHASHSEED": "0", "TZ": "Pacific/Kiritimati", "LC_ALL": "C.UTF-8", "COLUMNS": "20"},
    {"PYTHONHASHSEED": "1", "TZ": "America/St_Johns", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONHASHSEED": "4294967295", "TZ": "<-0330>3:30", "LC_ALL": "POSIX", "PYTHONUTF8": "1", "LANGUAGE": "tr"},
]


@pytest.mark.parametrize("place", PLACES)
def test_a_byte_that_hangs_on_locale_time_zone_or_hash_seed(tmp_path: Path, place: dict[str, str]) -> None:
    """Lists drifted with the machine that made them: every object, not the root alone, is the same elsewhere."""
    here = store()
    prepared(tmp_path / "here", here)
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "elsewhere")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | place, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {key: object_digest(here.read(key)) for key in here.list()}


def test_a_folder_written_with_backslashes(tmp_path: Path) -> None:
    """The same corpus with a path as Windows writes it: the same files are read, and the same bytes come out."""
    rows = write_jsonl(tmp_path / "own.jsonl", [page(i) for i in range(64 + HELD_OUT)])
    found = []
    for path in (str(rows), str(rows).replace("/", "\\")):
        target = store()
        files = [pin(rows, kind="rows") | {"path": path}]
        sources = [{"name": "rows", "files": files}]
        prepared(tmp_path, target, sources=sources, tokenizer=BYTES, held_out_windows=HELD_OUT)
        found.append({key: hashlib.sha256(target.read(key)).hexdigest() for key in target.list()})
    assert found[0] == found[1]


def plain(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


WRITTEN = {
    "line ends": lambda row: plain(row).replace(b"\n", b"\r\n"),
    "white space": lambda row: b" \t" + plain(row).replace(b": ", b" :\t") + b"",
    "order of keys": lambda row: plain(dict(reversed(row.items()))),
    "escapes": lambda row: json.dumps(row).replace("<", "\\u003c").encode() + b"\n",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_the_same_rows_written_otherwise(tmp_path: Path, how: str) -> None:
    """CRLF and JSON that is not canonical made other lists of the same texts; here only the file's pin differs."""
    rows = [{"text": f"{i:03d} naïve\r\n数据 <b>\n" + "z" * (i % 50), "score": i} for i in range(150)]
    mixes = []
    for write in (plain, WRITTEN[how]):
        path = tmp_path / "own.jsonl"
        path.write_bytes(b"".join(write(row) for row in rows))
        sources = [{"name": "rows", "files": [pin(path, kind="rows")]}]
        mixes.append(prepared(tmp_path, store(), sources=sources, tokenizer=BYTES)[1].mix)
    assert mixes[0].sources == mixes[1].sources and mixes[0].held_out_root == mixes[1].held_out_root
    assert mixes[0].sources[0].skipped == {} and mixes[0].spec != mixes[1].spec
