"""Where two mixes part: the first source, file, document and window that differ, and what could be the reason.

    spec → documents of each source (by the indexes) → tokenizer → windows → all else under the mix root

What is compared stands in the manifests; documents and windows are named if their files lie beside the manifest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.corpus import made_with
from storage.corpus.compare_documents import first_other_document
from storage.corpus.index import Index
from storage.corpus.spec import SourceSpec
from storage.errors import InputFault, MissingObject
from storage.stream import Stream
from storage.windows import PARTS, WindowReader


@dataclass(frozen=True)
class Difference:
    """what: the first that differs, in one line; cause: what could explain it."""

    what: str
    cause: str


def first_difference(recorded: Stream, rebuilt: Stream) -> Difference | None:
    """From the spec down to a document and a window; None if the mixes are the same."""
    if recorded.manifest.root == rebuilt.manifest.root:
        return None
    one, other = recorded.manifest.mix, rebuilt.manifest.mix
    if what := next(_specs(one.spec.model_dump(mode="json"), other.spec.model_dump(mode="json")), ""):
        return Difference(what, "another recipe than the recorded mix was made by")
    cause = _cause(recorded, rebuilt)
    for number, source in enumerate(one.sources):
        if source != other.sources[number]:
            if what := _source(recorded, rebuilt, number):
                return Difference(f"source {source.name}, {what}", cause)
    if one.tokenizer != other.tokenizer:
        return Difference(f"tokenizer: {one.tokenizer.digest} and {other.tokenizer.digest}", cause)
    for path, a, b in _differences(one.model_dump(mode="json"), other.model_dump(mode="json"), "mix"):
        return Difference(f"{path}: {a!r} and {b!r}", cause)
    raise AssertionError("two mix roots over equal content")


def _cause(recorded: Stream, rebuilt: Stream) -> str:
    try:
        one, other = (made_with.recorded(stream.store, stream.base) for stream in (recorded, rebuilt))
    except InputFault as error:
        return f"unknown: {error.message}"
    if one is None or other is None:
        return "unknown: with which code and libraries it was made is not written beside each mix"
    if found := made_with.differences(one, other):
        return f"made with {found}"
    return (
        "not the versions: both say that the same code made them with the same libraries; so a faulty machine, or a "
        "mix that was changed afterwards"
    )


def _specs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[str]:
    """What differs in two mix specs, sources and files by their names."""
    sources, others = (
        {source["name"]: SourceSpec.model_validate(source) for source in spec.pop("sources")} for spec in (one, other)
    )
    yield from (f"spec.{path}: {a!r} and {b!r}" for path, a, b in _differences(one, other))
    if list(sources) != list(others):
        yield f"spec.sources: {list(sources)} and {list(others)}"
    for name in sources:
        yield from _files(name, sources[name], others[name])


def _files(source: str, one: SourceSpec, other: SourceSpec) -> Iterator[str]:
    files, others = ({file.name: file.model_dump(mode="json") for file in spec.files} for spec in (one, other))
    for name in sorted(files.keys() | others.keys()):
        if name not in files or name not in others:
            yield f"source {source}, file {name}: only in the {'recorded' if name in files else 'rebuilt'} mix"
        else:
            for path, a, b in _differences(files[name], others[name]):
                yield f"source {source}, file {name}: {path} {a!r} and {b!r}"


def _source(recorded: Stream, rebuilt: Stream, number: int) -> str:
    """The first document and the first window of a source that differ, as far as can be seen; "" if all is equal."""
    one, other = (stream.manifest.mix for stream in (recorded, rebuilt))
    same_ids = one.tokenizer == other.tokenizer
    found = [_document(recorded, rebuilt, number, same_ids)]
    for name in ("skipped", "text_bytes"):
        a, b = (getattr(mix.sources[number], name) for mix in (one, other))
        found += [f"{name} {a} and {b}"] if a != b else []
    if same_ids:  # else every window differs
        parts = (part for part in PARTS if _root(recorded, number, part) != _root(rebuilt, number, part))
        found += [_window(recorded, rebuilt, number, part) for part in parts][:1]
    return "; ".join(filter(None, found))


def _document(recorded: Stream, rebuilt: Stream, number: int, same_ids: bool) -> str:
    try:
        return first_other_document(recorded, rebuilt, number, same_ids)
    except MissingObject:
        return ""


def _root(stream: Stream, source: int, part: str) -> str:
    return str(getattr(stream.manifest.mix.sources[source], part).root)


def _window(recorded: Stream, rebuilt: Stream, source: int, part: str) -> str:
    """The first window of a part that differs, and the documents of the recorded one."""
    readers = [WindowReader(s.manifest, s.store, s.base, source, part) for s in (recorded, rebuilt)]
    width = recorded.manifest.mix.spec.shard_windows
    both = enumerate(zip(*(reader.windows.shards for reader in readers), strict=False))
    shard = next((shard for shard, (a, b) in both if a != b), None)
    if shard is None:
        counts = [reader.windows.windows for reader in readers]
        return f"{part}: {counts[0]} and {counts[1]} windows, the same as far as both go"
    rows = range(shard * width, min((shard + 1) * width, *(reader.windows.windows for reader in readers)))
    try:
        leaves = [reader.leaves(np.array(rows)) for reader in readers]
    except MissingObject:
        return f"{part} windows {rows.start} to {rows.stop - 1} (shard {shard})"
    row = next((row for row, a, b in zip(rows, *leaves, strict=True) if a != b), rows.stop)
    return f"{part} window {row} (shard {shard}){_held(recorded, source, part, row)}"


def _held(recorded: Stream, source: int, part: str, row: int) -> str:
    """Which documents are in that window, if it can be said."""
    try:
        documents = Index(recorded, source).in_rows(part, [row])[row]
    except MissingObject:
        return ""
    return f", which holds text of {', '.join(document.address for document in documents)}" if documents else ""


def _differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value, value) of what differs in two JSON values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{index}]")
    elif a != b:
        yield path, a, b
