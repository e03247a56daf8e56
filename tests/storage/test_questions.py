"""Which documents a step saw, and which steps a document: against an independent slicer and a walk over the run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model import schedule
from model.spec import ModelSpec, Phase, RunSpec, ScheduleSpec
from storage import questions as asked
from storage.corpus.index import Document, index_key, shard_index
from storage.corpus.manifest import stored
from storage.errors import InputFault, UsageError
from storage.ledger import HEADER_KEY, part_key
from storage.questions import Questions, Reader
from storage.store import MemoryStore, open_store
from storage.stream import Stream
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.corpus.mixes import pin, prepared, prose, write_jsonl
from tests.storage.counting import Counting
from tests.storage.test_stream import WIDTH, Slicer


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Questions, Slicer]:
    """The small mix of two sources, read by a run that passes over each of them more than twice."""
    folder, store = tmp_path_factory.mktemp("questions"), MemoryStore("questions")
    prepared(folder, store)
    stream = Stream.open(store)
    spec = run(int(2.6 * sum(stream.mixture.windows)))
    return Questions(stream, Reader("0" * 64, spec, schedule.total_steps(spec) // 2)), Slicer(folder, store)


def run(windows: int) -> RunSpec:
    """A run over that many windows of 32 tokens, 3 a step and 5 from the middle on."""
    length = WIDTH - 1
    shape = small.spec().model.model_dump() | {"seq_len": length}
    phases = (Phase(from_tokens=0, windows=3), Phase(from_tokens=length * (windows // 2), windows=5))
    plan = ScheduleSpec(peak_lr="0.003", warmup_tokens=64, total_tokens=length * windows, phases=phases)
    return small.spec(model=ModelSpec(**shape), schedule=plan)


def address(document: Document) -> tuple[str, str, int]:
    return document.file, document.member, document.position


def every(questions: Questions) -> list[Document]:
    """All documents of the mix."""
    return [
        document
        for source in range(len(questions.stream.mixture.names))
        for part in ("train", "held_out")
        for document in questions.index(source).named(part, "")
    ]


def test_a_step_sees_what_the_slicer_cuts(mix: tuple[Questions, Slicer]) -> None:
    questions, slicer = mix
    assert questions.reader is not None
    for step in (0, 40, schedule.total_steps(questions.reader.spec) - 1):
        plan = schedule.plan(questions.reader.spec, step)
        shown = questions.step(step)
        assert [one.window for one in shown] == list(range(plan.first_window, plan.first_window + plan.windows))
        for one in shown:
            window = slicer.window(questions.stream.mixture.names.index(one.source), one.row)
            found = [address(piece.document) for piece in one.pieces for _ in range(piece.tokens)]
            assert found == [name for name, _ in window] and one.step == step
            at = 0
            for piece in one.pieces:
                ids = [token for _, token in window[at : at + piece.tokens]]
                assert piece.text == questions.tokens.text(np.array([i for i in ids if i]))
                at += piece.tokens


def test_every_document_reads_as_it_was_written(mix: tuple[Questions, Slicer], tmp_path: Path) -> None:
    questions, _ = mix
    cut = []
    for document in every(questions):
        number = document.position if document.file == "rows.jsonl" else 1000 + int(document.member[5:7])
        written = prose(number, 5 + number % 40 if number < 1000 else 30 + number - 1000)
        read = questions.document(document.id)
        assert read.document == document
        if read.missing:
            cut.append(document.id)
            assert written.startswith(read.text.rstrip("\ufffd"))
        else:
            assert read.text == written
    ends = [entry.documents - 1 for source in questions.stream.manifest.mix.sources for entry in [source.train]]
    assert {name for name in cut if "/train/" in name} <= {f"rows/train/{ends[0]}", f"texts/train/{ends[1]}"}


def test_the_steps_of_every_document_over_all_passes(mix: tuple[Questions, Slicer]) -> None:
    questions, slicer = mix
    assert questions.reader is not None
    spec, documents = questions.reader.spec, every(questions)
    count = schedule.total_windows(spec)
    located = questions.stream.locate(0, count)
    walked: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for window in range(count):
        held = slicer.window(int(located.source[window]), int(located.position[window]))
        for name in dict.fromkeys(name for name, _ in held):
            walked.setdefault(name, []).append((window, int(located.passes[window])))
    step_of = [
        plan for step in range(schedule.total_steps(spec)) for plan in [step] * schedule.plan(spec, step).windows
    ]
    seen = questions.sightings(documents)
    assert len({passed for all_of in walked.values() for _, passed in all_of}) >= 3
    for document in documents:
        expected = walked.get(address(document), [])
        assert [(s.window, s.passed, s.step, s.done) for s in seen[document.id]] == [
            (window, passed, step_of[window], step_of[window] < questions.reader.recorded)
            for window, passed in expected
        ]
        assert expected or document.part == "held_out" or questions.document(document.id).text == ""


def test_without_a_run_a_document_is_in_windows_of_the_first_pass(mix: tuple[Questions, Slicer]) -> None:
    stream = mix[0].stream
    alone = Questions(stream)
    document = list(alone.index(0).named("train", ""))[5]
    sightings = alone.sightings([document])[document.id]
    assert {seen.passed for seen in sightings} == {0} and {seen.step for seen in sightings} == {None}
    assert document in [piece.document for piece in alone.window(sightings[0].window)[0].pieces]
    with pytest.raises(UsageError, match="without a run: windows, but no steps"):
        alone.step(0)


def test_a_published_step_is_read_by_ranges_alone(made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counting(made.published)
    monkeypatch.setattr(asked, "open_store", lambda uri: counted if uri == made.published.uri else open_store(uri))
    shown = Questions.open(made.published.uri).step(9)
    stream = made.release().stream
    assert {one.window for one in shown} == {19, 20, 21} and {one.source for one in shown} == {"verbs", "nouns"}
    row = stream.window_tokens * stream.dtype.itemsize
    assert sum(counted.ranges.values()) == 3 * row and all(key.endswith(".arrow") for key in counted.ranges)
    shards = {f"mix/windows/{one.source}/train/{one.row // 16:05d}.leaves" for one in shown}
    index = {f"mix/{index_key(one.source, 'train', one.row // 16)}" for one in shown}
    beside = {HEADER_KEY, part_key(11), "mix/manifest.json", "mix/tokenizer.json"}
    assert counted.whole == {key: made.published.size(key) for key in beside | shards | index}  # each of them once
    assert max(counted.whole[key] for key in shards) <= 32 * 16
    whole_index = sum(made.published.size(key) for key in made.published.list("mix/docs/"))
    assert len(index) == 2 and 5 * sum(counted.whole[key] for key in index) < whole_index  # 2 files of 11


def test_one_window_takes_of_the_index_what_is_of_its_shard(tmp_path: Path) -> None:
    """Of 22 shards one: 32 of its leaves with their path, less than 10 bytes of index for each of its documents."""
    store = MemoryStore("usual")
    path = write_jsonl(tmp_path / "usual.jsonl", [prose(i, 60) for i in range(1500)])
    prepared(tmp_path, store, shard_windows=512, sources=[{"name": "usual", "files": [pin(path, kind="rows")]}])
    counted = Counting(store)
    stream = Stream.open(counted)
    (shown,) = Questions(stream).window(700)
    assert shown.row // 512 == 1 and len(stream.manifest.mix.sources[0].train.shards) == 22
    shard, index = "windows/usual/train/00001", index_key("usual", "train", 1)
    assert set(counted.whole) == {"manifest.json", "tokenizer.json", index}
    assert counted.ranges == {f"{shard}.arrow": 2 * WIDTH, f"{shard}.proofs": 32 * 32 + 4 * 32}
    documents = len(pq.read_table(pa.BufferReader(store.read(index))))
    assert counted.whole[index] < 1000 + 10 * documents
    assert 20 * counted.whole[index] < sum(store.size(key) for key in store.list("docs/usual/train/"))


def test_a_document_is_read_by_ranges_alone(made: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counting(made.published)
    monkeypatch.setattr(asked, "open_store", lambda uri: counted if uri == made.published.uri else open_store(uri))
    questions = Questions.open(made.published.uri)
    read = questions.document("verbs/train/3")
    first, last = read.document.first_token // 17, (read.document.first_token + read.document.tokens - 1) // 17
    assert sum(counted.ranges.values()) == (last - first + 1) * 34
    text = (made.folder / "sources" / "verbs.jsonl").read_text().splitlines()[read.document.position]
    assert read.text == json.loads(text)["text"]


def test_a_runs_folder_its_release_and_its_mix_answer_alike(made: Small) -> None:
    folder, published = Questions.open(str(made.folder)), Questions.open(made.published.uri)
    assert folder.reader == published.reader and folder.reader and folder.reader.recorded == 12
    assert folder.step(11) == published.step(11)
    (shown,) = Questions.open(str(made.folder / "mix")).window(27)
    assert dataclasses.replace(shown, step=11) == published.step(11)[2]


def test_a_run_that_goes_on_says_what_is_still_to_come(made: Small) -> None:
    for step in (9, 10, 11):
        made.store.delete(part_key(step))
    questions = Questions.open(str(made.folder))
    assert questions.reader is not None and questions.reader.recorded == 9
    documents = [piece.document for one in questions.step(11) for piece in one.pieces]
    seen = questions.sightings(documents)
    assert any(not sighting.done and sighting.step == 11 for sightings in seen.values() for sighting in sightings)
    assert all(sighting.done == ((sighting.step or 0) < 9) for sightings in seen.values() for sighting in sightings)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (lambda q: q.step(12), r"step 12 is outside run 'small': its 12 steps are 0 to 11"),
        (lambda q: q.window(28), r"window 28 was asked for; run 'small' reads windows 0 to 27"),
        (lambda q: q.window(-1), r"window -1 was asked for"),
        (lambda q: q.document("verbs/train/9999"), r"no document 'verbs/train/9999'; the mix has verbs/train/0 to \d+"),
        (lambda q: q.document("verbs/train/03"), r"no document 'verbs/train/03'"),
        (lambda q: q.document("verbs/train/3/x"), r"no document 'verbs/train/3/x'"),
        (lambda q: q.document("verbs"), r"no document 'verbs'"),
        (lambda q: q.document("adverbs/train/0"), r"no document 'adverbs/train/0'"),
        (lambda q: q.document("verbs/tail/0"), r"no document 'verbs/tail/0'"),
        (lambda q: q.document("verbs/train/²"), r"no document 'verbs/train/²'"),
        (lambda q: q.document("verbs/train/" + "9" * 5000), r"no document 'verbs/train/999"),
    ],
)
def test_what_does_not_exist_is_one_clear_error(made: Small, question: Callable[[Questions], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        question(Questions.open(made.published.uri))
    assert error.value.next_step


@pytest.mark.parametrize("name", ["run", "keys", "nowhere"])
def test_a_folder_without_a_mix(made: Small, name: str) -> None:
    with pytest.raises(UsageError, match="holds no mix"):
        Questions.open(str(made.folder / name))


def test_another_mix_beside_the_run_is_an_input_fault(made: Small, tmp_path: Path) -> None:
    small.mix(tmp_path / "sources", open_store(str(tmp_path / "mix")), seed=4)
    (tmp_path / "run").symlink_to(made.folder / "run")
    with pytest.raises(InputFault, match="has mix root"):
        Questions.open(str(tmp_path))


def longer(stream: Stream) -> Questions:
    """The mix with another index, listed in the manifest as if it were the one: in its first shard, the second document
    takes a token from the third."""
    key = index_key(stream.manifest.mix.sources[0].name, "train", 0)
    columns = pq.read_table(pa.BufferReader(stream.store.read(key))).to_pydict()
    columns["tokens"][1] += 1
    columns["tokens"][2] -= 1
    columns["first_token"][2] += 1
    columns["first_window"][2] = columns["first_token"][2] // WIDTH
    columns["last_window"][1] = (columns["first_token"][2] - 1) // WIDTH
    data = shard_index(pa.table(columns))
    store = MemoryStore("longer")
    for other in stream.store.list():
        store.create(other, data if other == key else stream.store.read(other))
    files = stream.manifest.files | {key: stored(data)}
    return Questions(Stream(stream.manifest.model_copy(update={"files": files}), store))


def test_an_index_that_the_windows_contradict(mix: tuple[Questions, Slicer]) -> None:
    """In itself it is sound; only the ends of documents, in the windows, tell."""
    questions = longer(mix[0].stream)
    document = questions.index(0).document("train", 1)
    assert document is not None
    window = questions.stream.mixture.in_pass(0, np.array([(document.end - 1) // WIDTH]), 0)
    said = r"docs/rows/train/00000\.parquet has ends of documents at tokens \[.*\] of "
    with pytest.raises(InputFault, match=said + "window"):
        questions.window(int(window[0]))
    with pytest.raises(InputFault, match=said + "document rows/train/1, the windows at"):
        questions.document("rows/train/1")
