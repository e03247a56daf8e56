"""Where a text occurs in a mix: every training and held-out window is read, verified and turned into bytes again.

Exact: letter by letter as it was written, also across windows, never across the end of a document. Documents whose file
or member has the text in its name are found too. What lies in the tail of a source is in no window and not searched.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from storage.corpus.index import Document
from storage.errors import Refused, UsageError
from storage.questions import Questions
from storage.windows import PARTS

WINDOWS = 256  # that are looked at together
AROUND = 80  # bytes shown on either side of a match
END = b"\xff"  # of a document: in no UTF-8 text


@dataclass(frozen=True)
class Hit:
    """A document, at how many places the text begins in it, and the first with its surroundings ("" if only named)."""

    document: Document
    matches: int
    excerpt: str


@dataclass(frozen=True)
class _Vocabulary:
    """Bytes of each id, and how many."""

    pieces: list[bytes]
    sizes: np.ndarray


def search(questions: Questions, text: str, tell: Callable[[int, int], None] = lambda done, total: None) -> list[Hit]:
    """Documents that hold `text`, or are named so, by source, part and stream order. tell: (windows read, of).

    Raises UsageError if the text is empty or no Unicode, Refused if the tokenizer is no byte-level one.
    """
    try:
        needle = text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is not Unicode text", next_step="give the text in UTF-8") from None
    if not needle:
        raise UsageError("an empty text is everywhere", next_step="give a text to search for")
    vocabulary, entries = _vocabulary(questions), questions.stream.manifest.mix.sources
    total = sum(getattr(entry, part).windows for entry in entries for part in PARTS)
    hits: list[Hit] = []
    done = 0
    for source in range(len(entries)):
        for part in PARTS:
            hits += _in_part(questions, source, part, needle, vocabulary, partial(_tell, tell, done, total))
            done += getattr(entries[source], part).windows
    return hits


def _tell(tell: Callable[[int, int], None], before: int, total: int, read: int) -> None:
    tell(before + read, total)


def _vocabulary(questions: Questions) -> _Vocabulary:
    pieces = questions.tokens.id_bytes()
    if pieces is None:
        raise Refused(
            "texts are searched for in mixes with a byte-level tokenizer; this mix has another",
            next_step="ask for a step, a window or a document",
        )
    pieces[questions.tokens.eot] = END
    return _Vocabulary(pieces, np.array([len(piece) for piece in pieces]))


def _in_part(
    questions: Questions, source: int, part: str, needle: bytes, vocabulary: _Vocabulary, tell: Callable[[int], None]
) -> list[Hit]:
    index = questions.index(source)
    found = {document.number: Hit(document, 0, "") for document in index.named(part, needle.decode())}
    for tokens, starts, data in _matches(questions, source, part, needle, vocabulary, tell):
        for document, count, first in index.at_tokens(part, tokens):
            before = found.get(document.number, Hit(document, 0, ""))
            place = int(starts[np.searchsorted(tokens, first)])
            excerpt = before.excerpt or _excerpt(data, place, len(needle))
            found[document.number] = Hit(document, before.matches + count, excerpt)
    return [found[number] for number in sorted(found)]


def _matches(
    questions: Questions, source: int, part: str, needle: bytes, vocabulary: _Vocabulary, tell: Callable[[int], None]
) -> Iterator[tuple[np.ndarray, np.ndarray, bytes]]:
    """(token in the part's stream, byte in data, data) of the matches' beginnings, stretch by stretch in order."""
    stream = questions.stream
    count = getattr(stream.manifest.mix.sources[source], part).windows
    kept = np.empty(0, stream.dtype)  # as many tokens of the last stretch as a match that ends in this one may need
    for first in range(0, count, WINDOWS):
        last = min(first + WINDOWS, count)
        ids = np.concatenate([kept, stream.rows(source, part, np.arange(first, last)).reshape(-1)])
        data = b"".join(vocabulary.pieces[i] for i in ids.tolist())
        ends = np.cumsum(vocabulary.sizes[ids])
        old = int(ends[len(kept) - 1]) if len(kept) else 0
        starts = np.array(list(_all(data, needle, max(0, old - len(needle) + 1))), np.int64)
        if starts.size:
            beginning = first * stream.window_tokens - len(kept)
            yield beginning + np.searchsorted(ends, starts, side="right"), starts, data
        kept = ids[len(ids) - min(len(ids), len(needle) - 1) :]
        tell(last)


def _all(data: bytes, needle: bytes, start: int) -> Iterator[int]:
    while (start := data.find(needle, start)) >= 0:
        yield start
        start += 1


def _excerpt(data: bytes, place: int, size: int) -> str:
    left = data[max(0, place - AROUND) : place].rpartition(END)[2]
    right = data[place + size : place + size + AROUND].partition(END)[0]
    return (left + data[place : place + size] + right).decode(errors="ignore")
