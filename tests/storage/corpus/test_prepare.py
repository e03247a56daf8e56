"""Preparing a mix: the same bytes whatever the order, place, time zone or hash seed; whole or not at all."""

import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kernels import canonical
from storage.corpus import made_with, numbering
from storage.corpus.manifest import KEY, Manifest, mix_root, read_manifest
from storage.corpus.numbering import digests
from storage.corpus.pool import Done, serially
from storage.corpus.prepare import prepare
from storage.corpus.spec import MixSpec
from storage.errors import InputFault, Refused, StorageError, UsageError
from storage.store import MemoryStore
from tests.storage.corpus.mixes import pin, prepared, prose, small, write_jsonl, write_tar

ROOT = Path(__file__).resolve().parents[3]
FROZEN_ROOT = "19bfef21412f91124f49895510c70a9962c75ba638417d4750950fd45b398cbb"


def store(name: str = "") -> MemoryStore:
    """A fresh store."""
    result = MemoryStore(f"{os.urandom(8).hex()}{name}")
    assert not result.list()
    return result


def objects(of: MemoryStore) -> dict[str, bytes]:
    return {key: of.read(key) for key in of.list()}


class Interrupted(MemoryStore):
    """A store whose disk is full after some objects."""

    left = 10**9

    def create(self, key: str, data: bytes) -> bool:
        self.left -= 1
        if self.left < 0:
            raise StorageError(f"{key}: the disk is full")
        return super().create(key, data)


def test_the_root_is_frozen(tmp_path: Path) -> None:
    _, manifest = prepared(tmp_path, store())
    assert manifest.root == FROZEN_ROOT


def test_counts_add_up(tmp_path: Path) -> None:
    spec, manifest = prepared(tmp_path, store())
    rows, texts = manifest.mix.sources
    assert texts.skipped == {"not selected": 1, "undecodable": 1} and rows.skipped == {}
    assert rows.train.documents + rows.held_out.documents == 120
    assert texts.train.documents + texts.held_out.documents == 40
    for source in manifest.mix.sources:
        assert source.held_out.windows == spec.held_out_windows
        for part in (source.train, source.held_out):
            assert part.tokens == part.windows * 32 + part.tail
            assert sum(shard.windows for shard in part.shards) == part.windows
            assert [shard.windows for shard in part.shards[:-1]] == [8] * (len(part.shards) - 1)
        assert source.train.tail < 32
    assert sum(manifest.mix.counts) == 16 and manifest.mix.dtype == "uint16"


def test_the_same_bytes_from_another_folder_with_members_reversed(tmp_path: Path) -> None:
    one, other = store(), store()
    _, manifest = prepared(tmp_path / "a", one)
    assert prepare(small(tmp_path / "b"), tmp_path / "b", other).root == manifest.root
    assert objects(one) == objects(other)


def test_the_order_of_an_archive_is_no_order(tmp_path: Path) -> None:
    """Only the pin tells two archives with the same members in another order apart."""
    members = {f"{i}.txt": prose(i, 60).encode() for i in range(40)}
    roots = []
    for order in (members, dict(reversed(members.items()))):
        archive = write_tar(tmp_path / "texts.tar.gz", order)
        spec = small(tmp_path / "s", sources=[{"name": "texts", "files": [pin(archive)]}])
        source = prepare(spec, tmp_path, store()).mix.sources[0]
        roots.append((source.train.root, source.held_out.root))
    assert roots[0] == roots[1]


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
        {
            "PYTHONHASHSEED": "2",
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "RAYON_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "0",
        },
    ],
)
def test_the_same_root_in_another_environment(tmp_path: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from pathlib import Path; from storage.store import MemoryStore;"
        "from tests.storage.corpus.mixes import prepared;"
        "print(prepared(Path(sys.argv[1]), MemoryStore('x'))[1].root)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == FROZEN_ROOT


@pytest.mark.parametrize("change", [{"seed": 8}, {"seq_len": 30}, {"block": 17}, {"held_out_windows": 19}])
def test_whatever_decides_a_bit_is_in_the_root(tmp_path: Path, change: dict[str, Any]) -> None:
    _, manifest = prepared(tmp_path, store(), **change)
    assert manifest.root != FROZEN_ROOT


def test_preparing_twice_reads_and_returns_the_same(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    before = objects(target)
    told: list[str] = []
    assert prepare(spec, tmp_path, target, lambda what, done, total: told.append(what)) == manifest
    assert objects(target) == before
    assert set(told) == {"verify"}  # nothing was read, trained or encoded again


@pytest.mark.parametrize("written", [0, 1, 2, 5, 40, 62, 70])
def test_an_interrupted_call_leaves_no_manifest_and_is_taken_up(tmp_path: Path, written: int) -> None:
    whole = store()
    spec, manifest = prepared(tmp_path, whole)
    broken = Interrupted(f"{os.urandom(8).hex()}")
    broken.left = written
    with pytest.raises(StorageError, match="disk is full"):
        prepare(spec, tmp_path, broken)
    assert KEY not in broken.list() and len(broken.list()) == written < len(whole.list())
    broken.left = 10**9
    told: list[tuple[str, int, int]] = []
    assert prepare(spec, tmp_path, broken, lambda *report: told.append(report)) == manifest
    assert objects(broken) == objects(whole)
    assert not [what for what, done, total in told if what in ("read", "tokenizer", "encode") and done < total]
    assert not list(tmp_path.glob("parts-*"))


def test_a_mix_of_unknown_origin_is_not_said_to_be_made_here(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    assert made_with.recorded(target) == made_with.here()
    target.delete(made_with.KEY)
    assert prepare(spec, tmp_path, target) == manifest
    assert made_with.recorded(target) is None


def test_a_mix_of_which_objects_are_lost_is_made_whole_again(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    before = objects(target)
    target.delete("windows/texts/train/00000.leaves")
    assert prepare(spec, tmp_path, target) == manifest
    assert objects(target) == before


@pytest.mark.parametrize("how", ["text", "record", "lost", "cut"])
def test_a_damaged_piece_is_made_again(tmp_path: Path, how: str) -> None:
    whole = store()
    spec, manifest = prepared(tmp_path, whole)
    broken = Interrupted(f"{os.urandom(8).hex()}")
    broken.left = 20
    with pytest.raises(StorageError, match="disk is full"):
        prepare(spec, tmp_path, broken)
    (piece,) = tmp_path.glob("parts-*/runs/rows/000000.arrow")
    if how == "text":
        data = bytearray(piece.read_bytes())
        data[len(data) // 2] ^= 1
        piece.write_bytes(data)
    elif how == "cut":
        piece.write_bytes(piece.read_bytes()[:-100])
    elif how == "lost":
        piece.unlink()
    else:
        piece.with_suffix(".json").write_bytes(b"{}")
    broken.left = 10**9
    assert prepare(spec, tmp_path, broken) == manifest
    assert objects(broken) == objects(whole)


def test_of_two_that_prepare_one_mix_the_second_is_refused(tmp_path: Path) -> None:
    spec, target = small(tmp_path), store()

    def again(what: str, done: int, total: int) -> None:
        with pytest.raises(Refused, match="another process is preparing this mix"):
            prepare(spec, tmp_path, target)

    prepare(spec, tmp_path, target, again)


def test_duplicates_are_looked_for_in_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system maps some 65,000 files into a process at once; a data set may have more."""
    mapped: list[int] = []

    def counted(column: pa.ChunkedArray) -> np.ndarray:
        mapped.append(Path("/proc/self/maps").read_text().count("/texts/"))
        return digests(column)

    monkeypatch.setattr(numbering, "digests", counted)
    prepare(with_duplicates(tmp_path, duplicates="drop"), tmp_path, store())
    assert mapped == [1, 1, 1]


@pytest.mark.parametrize("sort_bytes", [1, 4000, 50_000])
def test_the_sort_budget_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sort_bytes: int) -> None:
    whole, target = store(), store()
    spec, manifest = prepared(tmp_path, whole)
    made: list[str] = []

    def run(stage: str, jobs: Sequence[Any], done: Done) -> None:
        made.extend(job.name for job in jobs if stage == "encode")
        serially(stage, jobs, done)

    assert prepare(spec, tmp_path, target, run=run, sort_bytes=sort_bytes) == manifest
    assert objects(target) == objects(whole)
    assert len(made) >= {1: 160, 4000: 20, 50_000: 2}[sort_bytes]


def test_how_many_documents_are_put_in_order_at_a_time_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.corpus.runs.TOGETHER", 7)
    assert prepared(tmp_path, store())[1].root == FROZEN_ROOT


def with_duplicates(folder: Path, **changes: Any) -> MixSpec:
    folder.mkdir(exist_ok=True)
    texts = [prose(i, 30) for i in range(90)]
    one = write_jsonl(folder / "a.jsonl", [*texts, texts[3], texts[5] + " ", texts[3]])
    two = write_jsonl(folder / "b.jsonl", [texts[7], *(prose(1000 + i, 30) for i in range(90)), texts[89]])
    three = write_jsonl(folder / "c.jsonl", [texts[3], *(prose(2000 + i, 30) for i in range(90))])
    files = [pin(two, kind="rows"), pin(one, kind="rows")]
    sources = [{"name": "first", "files": files}, {"name": "second", "files": [pin(three, kind="rows")]}]
    return small(folder, sources=sources, held_out_windows=1, **changes)


def test_exact_duplicates_are_dropped_and_counted_if_the_recipe_says_so(tmp_path: Path) -> None:
    kept, dropped = store(), store()
    every = prepare(with_duplicates(tmp_path), tmp_path, kept).mix
    mix = prepare(with_duplicates(tmp_path, duplicates="drop"), tmp_path, dropped).mix
    assert [source.skipped for source in every.sources] == [{}, {}]
    assert [source.skipped for source in mix.sources] == [{"duplicate": 4}, {"duplicate": 1}]
    for one, other in zip(every.sources, mix.sources, strict=True):
        documents = [part.train.documents + part.held_out.documents for part in (one, other)]
        assert documents[0] - documents[1] == other.skipped["duplicate"]
        gone = [prose(3, 30)] * (2 if one.name == "first" else 1)
        gone += [prose(7, 30), prose(89, 30)] if one.name == "first" else []
        assert one.text_bytes - other.text_bytes == sum(len(text.encode()) for text in gone)
    assert "duplicates" not in every.spec.model_dump() and mix.spec.duplicates == "drop"


@pytest.mark.parametrize("sort_bytes", [1, 9_000])
def test_duplicates_are_the_same_under_any_budget(tmp_path: Path, sort_bytes: int) -> None:
    spec = with_duplicates(tmp_path, duplicates="drop")
    manifest = prepare(spec, tmp_path, store())
    assert prepare(spec, tmp_path, store(), sort_bytes=sort_bytes) == manifest


def test_a_text_that_is_held_out_of_one_source_is_held_out_of_all(tmp_path: Path) -> None:
    """Each source alone has another threshold: the first holds out more than the second would by itself."""
    shared = [prose(i, 20) for i in range(60)]
    one = write_jsonl(tmp_path / "a.jsonl", [*shared, *(prose(500 + i, 30) for i in range(400))])
    two = write_jsonl(tmp_path / "b.jsonl", [f"  {text}" for text in shared] + [prose(900 + i, 90) for i in range(300)])
    sources = [{"name": "one", "files": [pin(one, kind="rows")]}, {"name": "two", "files": [pin(two, kind="rows")]}]
    target = store()
    prepare(small(tmp_path, sources=sources, held_out_windows=400), tmp_path, target)
    held = {source: positions(target, source, "held_out") for source in ("one", "two")}
    shown = held["one"] | held["two"]
    assert 9 < len({row for row in shown if row < 60}) < 60
    for source in ("one", "two"):
        assert {row for row in held[source] if row < 60} == {row for row in shown if row < 60}
        assert not positions(target, source, "train") & {row for row in shown if row < 60}


def positions(of: MemoryStore, source: str, part: str) -> set[int]:
    tables = [pq.read_table(io.BytesIO(of.read(key))) for key in of.list(f"docs/{source}/{part}/")]
    return {row for table in tables for row in table["position"].to_pylist()}


def test_a_damaged_object_is_found_when_a_mix_is_taken_up(tmp_path: Path) -> None:
    target = store()
    spec, _ = prepared(tmp_path, target)
    key = "windows/rows/train/00001.arrow"
    data = bytearray(target.read(key))
    data[-500] ^= 1
    target.delete(key)
    target.create(key, bytes(data))
    with pytest.raises(InputFault, match=r"windows/rows/train/00001\.arrow has digest"):
        prepare(spec, tmp_path, target)


def test_another_mix_is_not_overwritten(tmp_path: Path) -> None:
    target = store()
    prepared(tmp_path, target)
    before = objects(target)
    with pytest.raises(InputFault, match="holds the mix of another recipe"):
        prepare(small(tmp_path, seed=8), tmp_path, target)
    assert objects(target) == before


def test_a_changed_file_stops_everything_before_anything_is_written(tmp_path: Path) -> None:
    spec, target = small(tmp_path), store()
    with (tmp_path / "texts.tar").open("ab") as file:
        file.write(b"!")
    with pytest.raises(InputFault, match="differs from its pin"):
        prepare(spec, tmp_path, target)
    assert target.list() == []


@pytest.mark.parametrize("texts", [[], ["", " \n"], ["one short text"], ["word " * 4000]])
def test_too_small_a_corpus_is_one_clear_error_and_nothing_is_written(tmp_path: Path, texts: list[str]) -> None:
    tiny = write_jsonl(tmp_path / "tiny.jsonl", texts)
    many = write_jsonl(tmp_path / "rows.jsonl", [prose(i, 40) for i in range(90)])
    sources = [
        {"name": "rows", "files": [pin(many, kind="rows")]},
        {"name": "tiny", "files": [pin(tiny, kind="rows")]},
    ]
    target = store()
    with pytest.raises(InputFault, match="source tiny has") as error:
        prepare(small(tmp_path / "s", sources=sources, held_out_windows=1), tmp_path, target)
    assert error.value.next_step and target.list() == []


@pytest.mark.parametrize("held_out_windows", [50, 100, 600])
def test_texts_that_another_source_holds_out_do_not_make_up_for_too_few(tmp_path: Path, held_out_windows: int) -> None:
    shared = [prose(i, 20) for i in range(20)]
    few = write_jsonl(tmp_path / "few.jsonl", shared)
    many = write_jsonl(tmp_path / "many.jsonl", shared + [prose(900 + i, 30) for i in range(300)])
    sources = [{"name": n, "files": [pin(p, kind="rows")]} for n, p in (("few", few), ("many", many))]
    target = store()
    with pytest.raises(InputFault, match=f"too few for {held_out_windows} held-out windows"):
        prepare(small(tmp_path / "s", sources=sources, held_out_windows=held_out_windows), tmp_path, target)
    assert target.list() == []


def test_a_block_too_small_for_a_source(tmp_path: Path) -> None:
    target = store()
    with pytest.raises(UsageError, match="none of a block of 1"):
        prepared(tmp_path, target, block=1)
    assert target.list() == []


def test_given_proportions(tmp_path: Path) -> None:
    _, manifest = prepared(tmp_path, store(), block=None, proportions={"texts": 999, "rows": 1})
    assert manifest.mix.counts == (1, 999)
    assert 0 < manifest.mix.next_pass["texts"] < manifest.mix.next_pass["rows"]


def test_a_pinned_tokenizer(tmp_path: Path) -> None:
    first = store()
    _, manifest = prepared(tmp_path, first)
    (tmp_path / "tokenizer.json").write_bytes(first.read("tokenizer.json"))
    about = pin(tmp_path / "tokenizer.json")
    tokenizer = {"kind": "pinned", **{name: about[name] for name in ("path", "sha256", "size")}}
    _, again = prepared(tmp_path, store(), tokenizer=tokenizer)
    assert again.mix.tokenizer == manifest.mix.tokenizer and again.mix.sources == manifest.mix.sources


def test_a_hub_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target = store()
    hub = {"kind": "hub_files", "dataset": "a/b", "revision": "0" * 40, "licence": "MIT", "extract": {"kind": "rows"}}
    with pytest.raises(Refused, match="a/b at commit"):
        prepared(tmp_path, target, sources=[{"name": "hub", "files": [hub]}])
    assert target.list() == []


def damaged(manifest: Manifest, how: str) -> bytes:
    value = manifest.model_dump(mode="json")
    if how == "count":
        value["mix"]["counts"][0] += 1
    elif how == "leaves":
        value["mix"]["sources"][0]["held_out"]["shards"][0]["digest"] = "0" * 64
        value["root"] = mix_root(type(manifest.mix).model_validate(value["mix"]))
    elif how == "tail":
        value["mix"]["sources"][0]["train"]["tail"] += 1
    elif how == "field":
        value["mix"]["more"] = 1
    return canonical.dumps(value) + (b" " if how == "space" else b"")


@pytest.mark.parametrize(("how", "message"), [
    ("count", "has mix root"), ("leaves", "has held-out root"), ("field", "not a manifest"),
        ("tail", "are not"), ("space", "not canonical"),
])  # fmt: skip
def test_a_changed_manifest_is_refused(tmp_path: Path, how: str, message: str) -> None:
    _, manifest = prepared(tmp_path, store())
    target = store()
    target.create(KEY, damaged(manifest, how))
    with pytest.raises(InputFault, match=message):
        read_manifest(target)


def test_another_mix_than_the_one_expected(tmp_path: Path) -> None:
    target = store()
    _, manifest = prepared(tmp_path, target)
    assert read_manifest(target, root=manifest.root) == manifest
    with pytest.raises(InputFault) as error:
        read_manifest(target, root="0" * 64)
    assert manifest.root in error.value.message and "0" * 64 in error.value.message


def test_every_object_of_the_mix_is_listed(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    assert isinstance(spec, MixSpec)
    assert set(target.list()) == set(manifest.files) | {KEY, made_with.KEY}
    for key, file in manifest.files.items():
        assert len(target.read(key, file.digest)) == file.size


@pytest.mark.parametrize("count", [10**12, 2**62])
def test_a_hostile_count_allocates_nothing(tmp_path: Path, count: int) -> None:
    store = MemoryStore(str(tmp_path))
    _, manifest = prepared(tmp_path, store)
    document = manifest.model_dump(mode="json")
    document["mix"]["sources"][0]["train"]["windows"] = count
    store.delete(KEY)
    store.create(KEY, canonical.dumps(document))
    with pytest.raises(InputFault, match=f"shards do not hold {count} windows"):
        read_manifest(store)
