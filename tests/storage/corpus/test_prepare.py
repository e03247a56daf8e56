"""Preparing a mix: the same bytes whatever the order, place, time zone or hash seed; whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels import canonical
from storage.corpus import made_with
from storage.corpus.index import index_key
from storage.corpus.manifest import KEY, Manifest, mix_root, read_manifest
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
    assert set(told) == {"fetch"}  # nothing was extracted, trained or encoded again


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
    assert prepare(spec, tmp_path, broken) == manifest
    assert objects(broken) == objects(whole)


def test_a_mix_of_unknown_origin_is_not_said_to_be_made_here(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    assert made_with.recorded(target) == made_with.here()
    target.delete(made_with.KEY)
    assert prepare(spec, tmp_path, target) == manifest
    assert made_with.recorded(target) is None


def test_a_finished_source_is_not_made_again(tmp_path: Path) -> None:
    target = store()
    spec, manifest = prepared(tmp_path, target)
    for key in [KEY, "parts/sources/texts.json", index_key("texts", "train", 1)]:
        target.delete(key)
    told: list[str] = []
    assert prepare(spec, tmp_path, target, lambda what, done, total: told.append(what)) == manifest
    assert "encode texts" in told and "encode rows" not in told and "train tokenizer" not in told


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
    with pytest.raises(InputFault, match="exists with other content"):
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
    others = {KEY, made_with.KEY, "parts/tokenizer.json", "parts/sources/rows.json", "parts/sources/texts.json"}
    assert set(target.list()) == set(manifest.files) | others
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
