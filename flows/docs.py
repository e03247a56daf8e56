"""`verbatim docs`: a question to a run's data, its answer as one plain value, and as lines for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from storage.corpus.index import Document
from storage.errors import UsageError
from storage.mirrors import bad_copies
from storage.questions import Piece, Questions, Shown, Sighting
from storage.search import search

EXCERPT = 200  # letters of a document's text, where many documents are shown
LISTED = 20  # documents of a search, and steps of a document, that a person is shown


def ask(
    copies: Sequence[str],
    step: int | None,
    window: int | None,
    document: str,
    text: str,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    """The answer to the one question that is given: {store, mix_root, run, windows, documents, bad_copies}.

    copies: the address, and those of further copies of a published run. windows: those of a step, or the one asked for,
    with the pieces of documents that they hold; documents: each with all windows and steps of the run that see it.
    """
    if [step is not None, window is not None, document != "", text != ""].count(True) != 1:
        raise UsageError(
            "give one of --step NUMBER, --window NUMBER, --doc ID, --search TEXT", next_step="verbatim docs --help"
        )
    questions = Questions.open(copies[0], copies[1:])
    answer = {"store": copies[0], "mix_root": questions.stream.manifest.root, "run": _run(questions)}
    found = _answer(questions, step, window, document, text, tell)
    return answer | found | {"bad_copies": [copy.document() for copy in bad_copies(questions.stream.store)]}


def _answer(
    questions: Questions,
    step: int | None,
    window: int | None,
    document: str,
    text: str,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    if text:
        hits = search(questions, text, tell)
        more = [{"matches": hit.matches, "excerpt": hit.excerpt} for hit in hits]
        return {"windows": [], "documents": _documents(questions, [hit.document for hit in hits], more)}
    if document:
        read = questions.document(document)
        more = [{"text": read.text, "missing": read.missing}]
        return {"windows": [], "documents": _documents(questions, [read.document], more)}
    shown = questions.step(step) if step is not None else questions.window(window or 0)
    found = {piece.document.id: piece.document for one in shown for piece in one.pieces}
    documents = _documents(questions, list(found.values()), [{} for _ in found])
    return {"windows": [_window(one) for one in shown], "documents": documents}


def _run(questions: Questions) -> dict[str, Any] | None:
    if questions.reader is None:
        return None
    return {"id": questions.reader.run_id, "name": questions.reader.spec.name, "recorded": questions.reader.recorded}


def _documents(
    questions: Questions, documents: Sequence[Document], more: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    seen = questions.sightings(documents)
    return [
        _address(document) | {"seen": [_sighting(sighting) for sighting in seen[document.id]]} | fields
        for document, fields in zip(documents, more, strict=True)
    ]


def _address(document: Document) -> dict[str, Any]:
    names = ("id", "source", "part", "file", "member", "position", "tokens")
    return {name: getattr(document, name) for name in names}


def _sighting(seen: Sighting) -> dict[str, Any]:
    return {"window": seen.window, "pass": seen.passed, "step": seen.step, "done": seen.done}


def _window(shown: Shown) -> dict[str, Any]:
    names = {"window": shown.window, "step": shown.step, "source": shown.source, "pass": shown.passed, "row": shown.row}
    return names | {"pieces": [_piece(piece) for piece in shown.pieces]}


def _piece(piece: Piece) -> dict[str, Any]:
    return {"id": piece.document.id, "start": piece.start, "tokens": piece.tokens, "text": piece.text}


def lines(answer: dict[str, Any]) -> Iterator[str]:
    """The answer for a person: whole texts where one window or document was asked for, else their beginnings."""
    documents = {document["id"]: document for document in answer["documents"]}
    whole = len(answer["windows"]) + len(documents) * (not answer["windows"]) == 1
    yield _heading(answer)
    for window in answer["windows"]:
        step = "" if window["step"] is None else f", step {window['step']}"
        yield (
            f"window {window['window']}{step}: window {window['row']} of {window['source']}, pass {window['pass']}, "
            f"{_count(window['pieces'], 'document')}"
        )
        for piece in window["pieces"]:
            document = documents[piece["id"]]
            held = f"tokens {piece['start']} to {piece['start'] + piece['tokens'] - 1} of {document['tokens']}"
            yield f"  {_title(document)}: {held}"
            yield f"    {_seen(answer, document)}"
            yield from _text(piece["text"], whole)
    if not answer["windows"]:
        for document in answer["documents"][:LISTED]:
            yield from _document(answer, document, whole)
        if (left := len(documents) - LISTED) > 0:
            yield f"and {left} documents more: --json lists all"


def _heading(answer: dict[str, Any]) -> str:
    run, windows = answer["run"], answer["windows"]
    whose = f"run {run['name']} ({run['recorded']} steps done)" if run else "a mix without a run"
    held = f"{_count(windows, 'window')}, " if windows else ""
    return f"{whose}: {held}{_count(answer['documents'], 'document')}; mix root {answer['mix_root']}"


def _document(answer: dict[str, Any], document: dict[str, Any], whole: bool) -> Iterator[str]:
    places = document.get("matches")
    matches = "" if places is None else f", {places} match{'' if places == 1 else 'es'}"
    missing = f", the last {document['missing']} in no window" if document.get("missing") else ""
    yield f"{_title(document)}: {document['tokens']} tokens{missing}{matches}"
    yield f"    {_seen(answer, document)}"
    yield from _text(document.get("text", document.get("excerpt", "")), whole)


def _title(document: dict[str, Any]) -> str:
    return " ".join(str(document[name]) for name in ("id", "file", "member", "position") if document[name] != "")


def _seen(answer: dict[str, Any], document: dict[str, Any]) -> str:
    """By which steps, done or to come; without a run, in which windows of the first pass."""
    if document["part"] == "held_out":
        return "held out: in no step's windows"
    if not answer["run"]:
        return f"in {_numbers('window', [seen['window'] for seen in document['seen']])} of the first pass"
    done, due = ([seen["step"] for seen in document["seen"] if seen["done"] is when] for when in (True, False))
    parts = (
        [f"seen in {_numbers('step', done)}"] if done else ["not seen by any step yet" if due else "seen by no step"]
    )
    return "; ".join(parts + ([f"to come in {_numbers('step', due)}"] if due else []))


def _count(things: Sequence[Any], what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def _numbers(what: str, numbers: list[int]) -> str:
    once = list(dict.fromkeys(numbers))
    more = f" and {len(once) - LISTED} more" if len(once) > LISTED else ""
    return f"{what}{'s' * (len(once) > 1)} {', '.join(map(str, once[:LISTED]))}{more}" if once else f"no {what}"


def _text(text: str, whole: bool) -> Iterator[str]:
    shown = text if whole else " ".join(text[:EXCERPT].split()) + ("…" if len(text) > EXCERPT else "")
    if shown:
        yield "\n".join(f"    | {line}" for line in shown.splitlines())
