"""Two mixes that differ: the first source, file, document and window are named, and the versions that could be why."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.corpus import extract, made_with
from storage.corpus.compare import Difference, first_difference
from storage.corpus.compare_documents import first_other_document
from storage.corpus.extract import Row
from storage.corpus.index import Index
from storage.corpus.made_with import MadeWith
from storage.corpus.manifest import KEY as MANIFEST
from storage.corpus.prepare import TOKENIZER
from storage.corpus.tokens import train
from storage.errors import Refused
from storage.store import MemoryStore, Store
from storage.stream import Stream
from storage.windows import WindowReader
from tests.storage.corpus.mixes import pin, prepared, prose, small, write_jsonl
from tests.storage.counting import Counting

CALM = "docs/00.txt"  # a document that stays in its part when a word of it changes


def made(folder: Path, **changes: Any) -> Stream:
    store = MemoryStore(os.urandom(8).hex())
    prepared(folder, store, **changes)
    return Stream.open(store)


def with_text(member: str, change: Callable[[str], str | None]) -> Any:
    """An extractor with a fault: one text of the archive comes out changed, or not at all."""
    honest = extract.rows

    def rows(*args: Any) -> Any:
        for row in honest(*args):
            if row.member != member or row.text is None:
                yield row
            elif (text := change(row.text)) is not None:
                yield Row(row.member, row.position, text)

    return rows


def pinned(folder: Path, recorded: Stream) -> dict[str, Any]:
    """The recorded mix's tokenizer, as a recipe pins it."""
    (folder / "tokenizer.json").write_bytes(recorded.store.read(TOKENIZER))
    about = pin(folder / "tokenizer.json")
    return {"kind": "pinned", **{name: about[name] for name in ("path", "sha256", "size")}}


def found(recorded: Stream, rebuilt: Stream) -> Difference:
    difference = first_difference(recorded, rebuilt)
    assert difference is not None and "\n" not in difference.what
    return difference


def without(stream: Stream, *ends: str) -> Stream:
    """The mix in a store that lacks the objects whose keys end so: at the least, a manifest alone."""
    store = MemoryStore(os.urandom(8).hex())
    for key in stream.store.list():
        if not key.endswith(ends):
            store.create(key, stream.store.read(key))
    return Stream.open(store)


def says(store: Store, code: str, **versions: str) -> None:
    """Let the mix say that it was made with this."""
    store.delete(made_with.KEY)
    honest = made_with.here()
    store.create(made_with.KEY, MadeWith(code=code, versions=honest.versions | versions).canonical())


def test_equal_mixes(tmp_path: Path) -> None:
    assert first_difference(made(tmp_path / "a"), made(tmp_path / "b")) is None


def test_another_spec(tmp_path: Path) -> None:
    recorded = made(tmp_path / "a")
    difference = found(recorded, made(tmp_path / "b", block=17))
    assert difference == Difference("spec.block: 16 and 17", "another recipe than the recorded mix was made by")
    other = small(tmp_path / "c").sources[0].files[0].model_dump()
    sources = [{"name": "rows", "files": [other]}, {"name": "texts", "files": [pin(tmp_path / "c" / "texts.tar")]}]
    said = found(recorded, made(tmp_path / "c", sources=sources)).what
    assert said.startswith("source texts, file texts.tar: extract.include")


def test_other_sources_and_files(tmp_path: Path) -> None:
    recorded, spec = made(tmp_path / "a"), small(tmp_path / "a")
    rows, texts = (source.model_dump() for source in spec.sources)
    assert found(recorded, made(tmp_path / "b", sources=[rows])).what == "spec.sources: ['rows', 'texts'] and ['rows']"
    more = pin(write_jsonl(tmp_path / "more.jsonl", ["more"]), kind="rows")
    rebuilt = made(tmp_path / "b", sources=[rows | {"files": [*rows["files"], more]}, texts])
    assert found(recorded, rebuilt).what == "source rows, file more.jsonl: only in the rebuilt mix"
    changed = pin(write_jsonl(tmp_path / "a" / "rows.jsonl", [prose(i, 50) for i in range(90)]), kind="rows")
    rebuilt = made(tmp_path / "b", sources=[rows | {"files": [changed]}, texts])
    said = found(recorded, rebuilt).what
    assert said.startswith("source rows, file rows.jsonl: sha256 ") and changed["sha256"] in said


def test_another_extraction_names_file_document_and_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    recorded = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    monkeypatch.setattr("storage.corpus.read.rows", with_text("docs/07.txt", lambda text: f"{text}!"))
    rebuilt = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    said = found(recorded, rebuilt).what
    (document,) = (d for part in ("train", "held_out") for d in Index(recorded, 1).named(part, "docs/07.txt"))
    assert said.startswith(f"source texts, file texts.tar, docs/07.txt document 0: {document.tokens} tokens (")
    assert f"and {document.tokens + 1} tokens (" in said and "; text_bytes " in said
    row = int(said.split("train window ")[1].split(" ")[0])
    one, other = (WindowReader(s.manifest, s.store, "", 1, "train").all_leaves() for s in (recorded, rebuilt))
    assert [a == b for a, b in zip(one, other, strict=False)].index(False) == row


def test_another_text_of_the_same_length_names_window_and_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = made(tmp_path / "a")
    recorded = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    monkeypatch.setattr("storage.corpus.read.rows", with_text(CALM, lambda text: text.replace("=", "~")))
    rebuilt = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    said = found(recorded, rebuilt).what
    assert said.startswith("source texts, train window ") and f"which holds text of texts.tar {CALM} 0" in said


@pytest.mark.slow
@pytest.mark.parametrize("shard_windows", [1, 8])
@pytest.mark.parametrize("longer", ["recorded", "rebuilt"])
def test_windows_that_only_one_mix_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longer: str, shard_windows: int
) -> None:
    monkeypatch.setattr("storage.corpus.documents.normalised", lambda text: text[:20])
    cut = {"tokenizer": pinned(tmp_path, made(tmp_path / "a")), "shard_windows": shard_windows}
    last = list(Index(made(tmp_path / "a", **cut), 1).named("train", "docs/"))[-1]
    mixes = []
    for more in (5, 200):
        rows = with_text(last.member, lambda text, more=more: text + " more" * more)
        with monkeypatch.context() as patch:
            patch.setattr("storage.corpus.read.rows", rows)
            mixes.append(made(tmp_path / "a", **cut))
    recorded, rebuilt = mixes if longer == "rebuilt" else reversed(mixes)
    one, other = (mix.manifest.mix.sources[1].train.windows for mix in (recorded, rebuilt))
    said = found(recorded, rebuilt).what
    assert f"texts.tar, {last.member} document 0" in said and mixes[0].manifest.mix.sources[1].train.tail
    if shard_windows == 1:
        assert f"train: {one} and {other} windows, the same as far as both go" in said
    else:
        assert f"train window {min(one, other)} " in said and f"texts.tar {last.member} 0" in said


def test_another_choice_of_what_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other Unicode tables would have it: the same texts, other keys."""
    recorded = made(tmp_path / "a")
    monkeypatch.setattr("storage.corpus.documents.normalised", lambda text: text.upper())
    said = found(recorded, made(tmp_path / "a")).what
    match = re.match(r"source rows, file rows\.jsonl, document (\d+): (\d+) tokens \((\w+)\) and (\d+) tokens", said)
    assert match and match[2] == match[4]
    parts = {d.position: part for part in ("train", "held_out") for d in Index(recorded, 0).named(part, "")}
    assert parts[int(match[1])] == match[3] and "; train window " in said


def test_a_document_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    monkeypatch.setattr("storage.corpus.read.rows", with_text("docs/07.txt", lambda text: None))
    said = found(recorded, made(tmp_path / "a")).what  # the tokenizer differs too, for this reason
    assert said.startswith("source texts, file texts.tar, docs/07.txt document 0: ") and "and absent" in said


def test_another_tokenizer_over_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    monkeypatch.setattr("storage.corpus.sample.train", lambda spec, texts: train(spec, reversed(sorted(texts)[:60])))
    rebuilt = made(tmp_path / "a")
    digests = [stream.manifest.mix.tokenizer.digest for stream in (recorded, rebuilt)]
    assert found(recorded, rebuilt).what == f"tokenizer: {digests[0]} and {digests[1]}"


@pytest.mark.parametrize("ends", [(".leaves",), (".leaves", ".parquet", ".arrow", "tokenizer.json", "made-with.json")])
def test_a_manifest_alone_is_enough_to_name_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[str, ...]
) -> None:
    recorded = made(tmp_path / "a")
    recorded = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    monkeypatch.setattr("storage.corpus.read.rows", with_text("docs/07.txt", lambda text: f"! {text}"))
    rebuilt = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    difference = found(without(recorded, *ends), rebuilt)
    assert "text_bytes" in difference.what
    shard = int(difference.what.split("(shard ")[1].rstrip(")"))
    one, other = (stream.manifest.mix.sources[1].train.shards for stream in (recorded, rebuilt))
    assert [a == b for a, b in zip(one, other, strict=False)].index(False) == shard
    assert f"train windows {8 * shard} to " in difference.what
    assert ("docs/07.txt" in difference.what) == (".parquet" not in ends)
    assert difference.cause.startswith("unknown: ") == ("made-with.json" in ends)


def test_without_an_index_the_window_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files gone, or a mix of before there was one for each shard."""
    recorded = made(tmp_path / "a")
    recorded = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    monkeypatch.setattr("storage.corpus.read.rows", with_text(CALM, lambda text: text.replace("=", "~")))
    rebuilt = made(tmp_path / "a", tokenizer=pinned(tmp_path, recorded))
    said = found(recorded, rebuilt).what
    files = {key: file for key, file in recorded.manifest.files.items() if not key.startswith("docs/")}
    older = Stream(recorded.manifest.model_copy(update={"files": files}), recorded.store)
    for bare in (without(recorded, ".parquet"), older):
        assert found(bare, rebuilt).what == said.split(", which holds text of ")[0] != said


def three_files(folder: Path, recorded: Stream, change: Callable[[str, int], str] = lambda name, row: "") -> Stream:
    """One source of three files, whose texts have something added to them after they were pinned."""
    folder.mkdir(exist_ok=True)
    names = ("a.jsonl", "b.jsonl", "c.jsonl")
    for number, name in enumerate(names):
        write_jsonl(folder / name, [prose(100 * number + i, 25) for i in range(40)])
    honest = extract.rows

    def rows(name: str, *more: Any) -> Any:
        for row in honest(name, *more):
            yield Row(row.member, row.position, row.text + change(name, row.position))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.corpus.read.rows", rows)
        sources = [{"name": "rows", "files": [pin(folder / name, kind="rows") for name in names]}]
        return made(folder, sources=sources, tokenizer=pinned(folder, recorded), held_out_windows=30)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Stream, Stream]:
    """(folder, a mix whose tokenizer all have, the mix of three files as it is without a fault)."""
    folder = tmp_path_factory.mktemp("three")
    plain = made(folder / "small")
    return folder / "x", plain, three_files(folder / "x", plain)


def documents(stream: Stream) -> dict[tuple[str, int], tuple[int, str]]:
    """(file, position) → (tokens, part)."""
    index = Index(stream, 0)
    return {(d.file, d.position): (d.tokens, d.part) for part in ("train", "held_out") for d in index.named(part, "")}


def first_of(one: Stream, other: Stream) -> str:
    """The difference that is to be named, found with both mixes in memory."""
    a, b = documents(one), documents(other)
    differ = sorted(key for key in a if a[key][0] != b[key][0]) or sorted(key for key in a if a[key] != b[key])
    file, position = differ[0]
    (count, part), (other_count, other_part) = a[differ[0]], b[differ[0]]
    return f"file {file}, document {position}: {count} tokens ({part}) and {other_count} tokens ({other_part})"


@pytest.mark.parametrize(
    "change",
    [
        lambda name, row: "!" * (name == "b.jsonl" and row in (17, 30)),
        lambda name, row: "!" * (name != "a.jsonl" and row % 9 == 5),
        lambda name, row: "!" * (name == "c.jsonl"),
    ],
)
def test_the_first_document_among_many_that_differ(
    three: tuple[Path, Stream, Stream], change: Callable[[str, int], str]
) -> None:
    """In the order of files and rows, not in that of the stream; one of another length before one that only moved."""
    folder, plain, one = three
    other = three_files(folder, plain, change)
    assert len(one.manifest.mix.sources[0].train.shards) > 10
    assert first_other_document(one, other, 0, tokens=True) == first_of(one, other)
    assert f"source rows, {first_of(one, other)}; " in found(one, other).what
    assert first_other_document(one, other, 0, tokens=False) == ""
    assert first_other_document(one, one, 0, tokens=True) == ""


def test_documents_that_moved_are_named_after_any_of_another_length(
    three: tuple[Path, Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain, one = three
    monkeypatch.setattr("storage.corpus.documents.normalised", lambda text: text.upper())
    moved = three_files(folder, plain)
    both = three_files(folder, plain, lambda name, row: "!" * (name == "c.jsonl" and row == 31))
    said = first_other_document(one, moved, 0, tokens=True)
    assert said == first_of(one, moved) and said.startswith("file a.jsonl")
    assert first_other_document(one, both, 0, tokens=True) == first_of(one, both)
    assert first_of(one, both).startswith("file c.jsonl, document 31: ")


def test_shards_with_the_same_index_are_not_read(three: tuple[Path, Stream, Stream]) -> None:
    """Of others, each is read once for the sums, and once for the documents of the file that differs."""
    folder, plain, one = three
    late = max((d for d in Index(one, 0).named("train", "")), key=lambda d: d.number * (d.file == "b.jsonl"))
    change = lambda name, row: "!" * (name == late.file and row == late.position)  # noqa: E731
    other = three_files(folder, plain, change)
    counted = [Counting(stream.store) for stream in (one, other)]
    sides = [Stream(stream.manifest, store) for stream, store in zip((one, other), counted, strict=True)]
    assert first_other_document(*sides, 0, tokens=True) == first_of(one, other)
    files = [{key: f for key, f in s.manifest.files.items() if key.startswith("docs/")} for s in (one, other)]
    alike = {key for key in files[0] if files[1].get(key) == files[0][key]}
    assert len(alike) > 5
    for mine, store in zip(files, counted, strict=True):
        assert store.whole == {key: 2 * file.size for key, file in mine.items() if key not in alike}


def test_the_versions_that_could_explain_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = made(tmp_path / "a")
    monkeypatch.setattr("storage.corpus.read.rows", with_text("docs/07.txt", lambda text: f"! {text}"))
    rebuilt = made(tmp_path / "a")
    assert found(recorded, rebuilt).cause.startswith("not the versions: ")
    honest = made_with.here()
    says(recorded.store, honest.code, unicode="13.0.0", tokenizers="0.21.4")
    tables, library = (honest.versions[name] for name in ("unicode", "tokenizers"))
    assert found(recorded, rebuilt).cause == f"made with tokenizers 0.21.4 and {library}, unicode 13.0.0 and {tables}"
    says(recorded.store, "0" * 64)
    assert found(recorded, rebuilt).cause == f"made with code {'0' * 16} and {honest.code[:16]}"
    recorded.store.delete(made_with.KEY)
    recorded.store.create(made_with.KEY, b"{}")
    assert found(recorded, rebuilt).cause.startswith("unknown: made-with.json")


def test_a_mix_is_made_with_what_finished_it(tmp_path: Path) -> None:
    """Not with what began it, of which nothing is taken up."""
    store = MemoryStore(os.urandom(8).hex())
    prepared(tmp_path, store)
    for begun in (lambda: says(store, "0" * 64), lambda: store.delete(made_with.KEY), lambda: _damage(store)):
        store.delete(MANIFEST)
        begun()
        prepared(tmp_path, store)
        assert made_with.recorded(store) == made_with.here()
    says(store, "0" * 64)
    prepared(tmp_path, store)  # is finished
    assert made_with.recorded(store) != made_with.here()


def _damage(store: Store) -> None:
    store.delete(made_with.KEY)
    store.create(made_with.KEY, b"damaged")


def test_a_rebuild_starts_empty_or_goes_on_with_its_own_parts(tmp_path: Path) -> None:
    store = MemoryStore(os.urandom(8).hex())
    made_with.claim(store)
    assert store.list() == [made_with.KEY]
    prepared(tmp_path, store)
    made_with.claim(store)
    says(store, made_with.here().code, unicode="13.0.0")
    with pytest.raises(Refused, match=r"was made with unicode 13\.0\.0 and ") as error:
        made_with.claim(store)
    assert store.uri in error.value.next_step
    for remove in (False, True):
        store.delete(made_with.KEY)
        if not remove:
            store.create(made_with.KEY, b"damaged")
        with pytest.raises(Refused, match="objects of unknown origin"):
            made_with.claim(store)
