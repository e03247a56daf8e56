"""The stream against the slow slicer, which was written from the design alone: every window, leaf and root."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kernels import canonical
from model import schedule
from model.spec import RunSpec
from storage.store import MemoryStore
from storage.stream import Stream
from tests.model.recipes import changed, run_section
from tests.storage.corpus import slicer
from tests.storage.corpus.mixes import pin, prepared, prose, write_jsonl, write_tar

FAR = 10**12  # blocks without end: far beyond what any run reads


@dataclass
class Made:
    mine: slicer.Mix
    stream: Stream
    store: MemoryStore

    def parts(self) -> list[tuple[int, str, str, slicer.Part]]:
        """(source number, source, part's name, part) of both parts of every source."""
        sources = enumerate(self.mine.sources)
        return [(s, one.name, part, getattr(one, part)) for s, one in sources for part in ("train", "held_out")]


def make(folder: Path, **changes: Any) -> Made:
    store = MemoryStore(str(folder))
    _, manifest = prepared(folder, store, **changes)
    recorded = json.loads(store.read("manifest.json"))["mix"]["spec"]
    mine = slicer.Mix(recorded, folder, store.read("tokenizer.json"))
    return Made(mine, Stream(manifest, store), store)


def odd_rows(folder: Path) -> list[dict[str, Any]]:
    """Three sources, not in order of name: rows of every kind, equal texts, long ones, names out of order."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [prose(i, 1 + i % 60) for i in range(90)]
    spaced = [f"\n{text.replace(' ', '  ')} " for text in texts[:30:3]]
    composed = ["caf\u00e9 na\u00efve \u212b", "cafe\u0301 nai\u0308ve A\u030a", "caf\u00e9 na\u00efve \u00c5"]
    late = write_jsonl(folder / "b.jsonl", [*texts, *spaced, *texts[10:20], *composed, "", " \u2003\n", "\ud800"])
    broken = folder / "a.jsonl"
    broken.write_bytes(
        b'{"text": "first"}\n\n \n{"text": "cr"}\r\n[1]\n{"text": 3}\n{"text": null}\n{"other": "x"}\n'
        b'{"text": "one"}\r{"text": "line"}\n{"text": "caf\xe9"}\n'
        b'{"text": "line\\nfeed"}\n{"text": "cut\n{"text": "' + "\u2028 last".encode() + b'"}'
    )
    long = write_jsonl(folder / "long.jsonl", [prose(2000 + i, 300) for i in range(12)])
    named = {"z.txt": prose(1, 200), "Z.txt": prose(2, 200), "\u00e9.txt": prose(3, 200), "a/b.txt": "  ", "a.txt": "a"}
    archive = write_tar(folder / "named.tar", {name: text.encode() for name, text in named.items()} | {"x": b"\xff"})
    alone = folder / "alone.txt"
    alone.write_text(prose(9, 400))
    rows, text = {"kind": "rows"}, {"kind": "text", "include": ["*.txt"], "exclude": ["a/*"]}
    return [
        {"name": "z-rows", "files": [pin(late, **rows), pin(broken, **rows)]},
        {"name": "long", "files": [pin(long, **rows)]},
        {"name": "archive", "files": [pin(archive, **text), pin(alone, kind="text"), pin(late, **rows)]},
    ]


def tied(folder: Path) -> list[dict[str, Any]]:
    """Sources of equal size, for ids that are bytes: with 160 tokens held out, texts of 20 come first and 8 are enough.

    A text of 21 comes late, and so does one of 20 that is equal to one of 21 but for white space.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for name in ("second", "first"):
        alone = [f"{name:8}{i:08} a." for i in range(30)]
        longer = [f"{name:8}{i:08} bc." for i in range(30)]
        pairs = [f"{name:8}{i:08}{space}d." for i in range(30) for space in (" ", "  ")]
        path = write_jsonl(folder / f"{name}.jsonl", [*pairs, *longer, *alone])
        sources.append({"name": name, "files": [pin(path, kind="rows")]})
    return sources


def wide_tokenizer(folder: Path) -> dict[str, Any]:
    """A tokenizer of 65,537 ids, one more than uint16 holds: bytes and names that no text uses."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*(f"unused{i}" for i in range(65_280)), *reversed(letters), "<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    data = tokenizer.to_str().encode()
    (folder / "wide.json").write_bytes(data)
    about = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return {"kind": "pinned", "path": str(folder / "wide.json"), **about}


CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "largest seed, one window to a shard, a block of 7": {"seed": 2**63 - 1, "shard_windows": 1, "block": 7},
    "proportions, shards of 5": {"seed": 0, "block": None, "proportions": {"rows": 9, "texts": 2}, "shard_windows": 5},
    "a small source read many times": {"seed": 11, "block": None, "proportions": {"texts": 1, "rows": 14}},
    "windows of two tokens": {"seq_len": 1, "held_out_windows": 30, "block": 501, "shard_windows": 1000},
    "one held-out window": {"seed": 3, "held_out_windows": 1, "block": 33},
    "odd rows": {"odd": True, "seed": 5, "seq_len": 12, "block": 13},
    "odd rows, long windows": {"odd": True, "seq_len": 100, "held_out_windows": 3, "block": 61, "shard_windows": 3},
    "ids of four bytes": {"wide": True, "seq_len": 15, "block": 9},
    "ties": {"wide": True, "tied": True, "seq_len": 15, "held_out_windows": 10, "block": 7},
}


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, changes = tmp_path_factory.mktemp("mix"), dict(request.param)
    if changes.pop("odd", False):
        changes["sources"] = odd_rows(folder)
    if changes.pop("tied", False):
        changes["sources"] = tied(folder)
    if changes.pop("wide", False):
        changes["tokenizer"] = wide_tokenizer(folder)
    return make(folder, **changes)


def test_every_window_and_leaf_of_both_parts(made: Made) -> None:
    for _, name, part, mine in made.parts():
        for number, shard in enumerate(made.mine.shards(mine)):
            key = f"windows/{name}/{part}/{number:05d}"
            assert made.store.read(f"{key}.leaves") == b"".join(made.mine.leaf(window) for window in shard), key
            rows_at = made.stream.manifest.files[f"{key}.arrow"].rows_at
            stored, row = made.store.read(f"{key}.arrow")[rows_at:], made.mine.size * made.mine.id_bytes
            for at, window in enumerate(shard):
                assert stored[at * row : (at + 1) * row] == made.mine.raw(window), (key, at)
        listed = [key for key in made.store.list(f"windows/{name}/{part}/") if key.endswith(".arrow")]
        assert len(listed) == len(made.mine.shards(mine))


def test_windows_are_disjoint_and_share_no_token_at_their_bounds(made: Made) -> None:
    for s, name, part, mine in made.parts():
        windows = made.stream.rows(s, part, np.arange(len(mine.windows)))
        assert windows[:, 0].tolist() == [mine.ids[w * made.mine.size] for w in range(len(windows))], (name, part)
        assert windows.reshape(-1).tolist() == mine.ids[: windows.size], (name, part)


def test_a_part_is_its_documents_each_with_one_end_of_text_after_it(made: Made) -> None:
    for s, name, part, mine in made.parts():
        entry = getattr(made.stream.manifest.mix.sources[s], part)
        read = made.stream.rows(s, part, np.arange(entry.windows)).reshape(-1).tolist()
        ids = read + mine.ids[len(read) :]  # the tail is in no window
        assert (entry.tokens, entry.tail) == (len(ids), len(ids) - len(read)), (name, part)
        ends = [at for at, token in enumerate(ids) if token == made.mine.eot]
        assert (len(ends), ends[-1]) == (entry.documents, len(ids) - 1), (name, part)
        texts = [made.mine.text(ids[at + 1 : end]) for at, end in zip([-1, *ends], ends)]
        assert texts == [made.mine.sources[s].texts[number] for number in mine.documents], (name, part)


def test_held_out_windows_and_no_text_in_both_parts_of_a_source(made: Made) -> None:
    windows = [window for source in made.mine.sources for window in source.held_out.windows]
    assert made.stream.held_out().tolist() == windows
    for source in made.mine.sources:
        held, train = ({slicer.normal(source.texts[i]) for i in p.documents} for p in (source.held_out, source.train))
        assert held and train and not held & train, source.name
        assert sorted(source.train.documents + source.held_out.documents) == list(range(len(source.texts)))


def test_the_manifest_and_every_root(made: Made) -> None:
    mix = made.stream.manifest.mix
    for s, _, part, mine in made.parts():
        assert getattr(mix.sources[s], part).root == made.mine.windows_root(mine)
    assert mix.held_out_root == made.mine.held_out_root()
    published = json.loads(made.store.read("manifest.json"))
    assert published["mix"] == made.mine.manifest()
    assert published["root"] == made.mine.root()
    assert canonical.dumps(published["mix"]) == slicer.canonical(made.mine.manifest())


def test_every_window_of_the_stream_until_each_source_is_in_its_third_pass(made: Made) -> None:
    each = range(len(made.mine.sources))
    blocks = max(2 * len(made.mine.sources[s].train.windows) // made.mine.counts[s] + 1 for s in each)
    count = blocks * sum(made.mine.counts)
    compare_stream(made, 0, count)
    passes = {made.mine.located(i)[:3:2] for i in range(count)}
    assert passes >= {(s, passed) for s in each for passed in (0, 1, 2)}


def test_windows_far_out(made: Made) -> None:
    for first in (2**31 - 5, 2**32 - 5, FAR):
        compare_stream(made, first, 10)


def compare_stream(made: Made, first: int, count: int) -> None:
    found = made.stream.locate(first, count)
    columns = [column.tolist() for column in (found.source, found.number, found.passes, found.position)]
    windows = made.stream.windows(first, count)
    leaves = made.stream.leaves(first, count)
    for at, place in enumerate(zip(*columns, strict=True)):
        assert place == made.mine.located(first + at), first + at
        mine = made.mine.window(first + at)
        assert windows[at].tobytes() == made.mine.raw(mine), first + at
        assert leaves[at] == made.mine.leaf(mine), first + at


def test_what_each_step_reads_and_its_digest(tmp_path: Path) -> None:
    made = make(tmp_path, seed=19, block=10)
    phases = [(0, 3), (31 * 40, 7), (31 * 45, 2), (31 * 46, 5), (31 * 150, 1)]
    section = changed(run_section("demo"), "schedule.phases", [{"from_tokens": t, "windows": w} for t, w in phases])
    section = changed(changed(section, "model.seq_len", 31), "schedule.total_tokens", 31 * 160 + 1)
    spec = RunSpec.model_validate(changed(section, "schedule.warmup_tokens", 0))
    steps = list(slicer.steps(section["schedule"] | {"total_tokens": 31 * 160 + 1}, 31))
    assert schedule.total_steps(spec) == len(steps)
    for step, (first, count) in enumerate(steps):
        plan = schedule.plan(spec, step)
        assert (plan.first_window, plan.windows) == (first, count), step
        read = made.stream.windows(first, count)
        assert read.tobytes() == b"".join(made.mine.raw(made.mine.window(i)) for i in range(first, first + count))
        assert made.stream.batch_digest(first, count) == made.mine.batch(first, count), step
    assert {count for _, count in steps} == {3, 7, 5, 1}  # the phase of 2 is jumped over


def test_duplicates(tmp_path: Path) -> None:
    """Of texts with the same bytes only the first of the whole mix stays."""
    folder = tmp_path
    kept = make(folder / "keep", duplicates="keep", sources=odd_rows(folder / "keep"))
    dropped = make(folder / "drop", duplicates="drop", sources=odd_rows(folder / "drop"))
    for one in (kept, dropped):
        assert json.loads(one.store.read("manifest.json"))["mix"] == one.mine.manifest()
        test_every_window_and_leaf_of_both_parts(one)
    counts = [source.skipped.get("duplicate", 0) for source in dropped.mine.sources]
    assert counts[0] == 10 and counts[1] == 0 and counts[2] >= 90  # the third source reads the first one's file again
    texts = [text for source in dropped.mine.sources for text in source.texts]
    assert len(set(texts)) == len(texts) < sum(len(source.texts) for source in kept.mine.sources)
