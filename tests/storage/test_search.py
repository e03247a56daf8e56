"""Search against Python's own, over the texts as they were written."""

import json
import tarfile

import pytest

from storage import search as module
from storage.errors import Refused, UsageError
from storage.questions import Questions
from storage.search import search
from storage.store import MemoryStore
from storage.stream import Stream
from tests.storage.corpus.mixes import prepared


@pytest.fixture(scope="module")
def mix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Questions, dict[tuple[str, int], str]]:
    """The small mix, and its texts by member and position."""
    folder, store = tmp_path_factory.mktemp("search"), MemoryStore("search")
    prepared(folder, store)
    lines = (folder / "rows.jsonl").read_text().split("\n")[:-1]
    texts = {("", number): json.loads(line)["text"] for number, line in enumerate(lines)}
    with tarfile.open(folder / "texts.tar") as tar:
        for name in tar.getnames():
            member = tar.extractfile(name)
            if name.endswith(".txt") and name != "docs/latin.txt" and member:
                texts[name, 0] = member.read().decode()
    return Questions(Stream.open(store)), texts


def count(text: str, wanted: str) -> int:
    return sum(text.startswith(wanted, place) for place in range(len(text)))


def expected(questions: Questions, texts: dict[tuple[str, int], str], wanted: str) -> dict[str, int]:
    """Matches by id, in the texts as far as windows hold them."""
    found = {}
    for source in (0, 1):
        for part in ("train", "held_out"):
            for document in questions.index(source).named(part, ""):
                text = texts[document.member, document.position]
                read = questions.document(document.id)
                if count(read.text if read.missing else text, wanted):
                    found[document.id] = count(read.text if read.missing else text, wanted)
    return found


@pytest.mark.parametrize("windows", [1, 2, 256])
@pytest.mark.parametrize("wanted", ["g", "ledger naïve", "数据", "🙂 <|endoftext|>", "+ 3.14\n return", "\r\n", "1 1"])
def test_every_occurrence_wherever_windows_and_stretches_end(
    mix: tuple[Questions, dict[tuple[str, int], str]], wanted: str, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOWS", windows)
    hits = search(mix[0], wanted)
    assert {hit.document.id: hit.matches for hit in hits} == expected(*mix, wanted)
    assert all(wanted in hit.excerpt for hit in hits)
    order = [(hit.document.source, hit.document.part == "held_out", hit.document.number) for hit in hits]
    assert order == sorted(order) and len(set(order)) == len(order)


def test_a_text_longer_than_windows(mix: tuple[Questions, dict[tuple[str, int], str]]) -> None:
    """A whole document is found once; with the beginning of the next one it is not there at all."""
    questions, _ = mix
    first, second = (questions.document(f"texts/train/{number}").text for number in (3, 4))
    assert [(hit.document.id, hit.matches) for hit in search(questions, first)] == [("texts/train/3", 1)]
    assert search(questions, first[-9:] + second[:9]) == []


def test_matches_that_overlap_all_count() -> None:
    assert list(module._all(b"aaa-aa", b"aa", 0)) == [0, 1, 4]


def test_the_end_of_a_document_is_no_text(mix: tuple[Questions, dict[tuple[str, int], str]]) -> None:
    excerpts = [hit.excerpt for hit in search(mix[0], "the")]
    texts = list(mix[1].values())
    assert all(any(excerpt in text for text in texts) for excerpt in excerpts)


def test_names_are_found_too(mix: tuple[Questions, dict[tuple[str, int], str]]) -> None:
    (hit,) = search(mix[0], "docs/07.txt")
    assert (hit.document.member, hit.matches, hit.excerpt) == ("docs/07.txt", 0, "")
    assert len(search(mix[0], "texts.tar")) == 40


def test_progress_reaches_the_end(mix: tuple[Questions, dict[tuple[str, int], str]]) -> None:
    told: list[tuple[int, int]] = []
    search(mix[0], "the", lambda done, total: told.append((done, total)))
    assert told == sorted(told) and {total for _, total in told} == {told[-1][0]}


@pytest.mark.parametrize("wanted", ["", "\udcff"])
def test_what_cannot_be_searched_for(mix: tuple[Questions, dict[tuple[str, int], str]], wanted: str) -> None:
    with pytest.raises(UsageError):
        search(mix[0], wanted)


def test_a_tokenizer_of_another_kind_is_refused(
    mix: tuple[Questions, dict[tuple[str, int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.corpus.tokens.Tokens.id_bytes", lambda self: None)
    with pytest.raises(Refused, match="byte-level"):
        search(mix[0], "the")


def test_bytes_of_ids_are_what_the_library_decodes(mix: tuple[Questions, dict[tuple[str, int], str]]) -> None:
    pieces, windows = mix[0].tokens.id_bytes(), mix[0].stream.windows(0, 50).reshape(-1)
    assert pieces is not None and len(pieces) == mix[0].tokens.vocab
    joined = b"".join(pieces[i] for i in windows.tolist())
    assert joined.decode(errors="replace") == mix[0].tokens.text(windows)
