"""Where two mixes part: the first source, file and window that differ."""

from collections.abc import Iterator
from typing import Any

from storage.corpus.index import Index
from storage.stream import Stream
from storage.windows import PARTS, WindowReader


def first_difference(recorded: Stream, rebuilt: Stream) -> str:
    """One line that names what differs first, from the spec down to a window; "" if the mixes are the same."""
    one, other = recorded.manifest.mix, rebuilt.manifest.mix
    if recorded.manifest.root == rebuilt.manifest.root:
        return ""
    for path, a, b in _differences(one.spec.model_dump(mode="json"), other.spec.model_dump(mode="json"), "spec"):
        return f"{path}: {a!r} and {b!r}"
    if one.tokenizer != other.tokenizer:
        return f"tokenizer: {one.tokenizer.digest} and {other.tokenizer.digest}"
    for number, source in enumerate(one.sources):
        for part in PARTS:
            if getattr(source, part).root != getattr(other.sources[number], part).root:
                return _window(recorded, rebuilt, number, part)
    for path, a, b in _differences(one.model_dump(mode="json"), other.model_dump(mode="json"), "mix"):
        return f"{path}: {a!r} and {b!r}"
    raise AssertionError("two mix roots over equal content")


def _window(recorded: Stream, rebuilt: Stream, source: int, part: str) -> str:
    """The first window of a part that differs, and the documents of the recorded one."""
    name = recorded.mixture.names[source]
    readers = [WindowReader(s.manifest, s.store, s.base, source, part) for s in (recorded, rebuilt)]
    row = next(_unequal(*(reader.all_leaves() for reader in readers)), None)
    if row is None:
        counts = [reader.windows.windows for reader in readers]
        return f"source {name}, {part}: {counts[0]} and {counts[1]} windows, the same as far as both go"
    shard = row // recorded.manifest.mix.spec.shard_windows
    documents = Index(recorded, source).in_rows(part, [row])[row]
    addresses = ", ".join(document.address for document in documents)
    return f"source {name}, {part} window {row} (shard {shard}), which holds text of {addresses}"


def _unequal(one: Iterator[bytes], other: Iterator[bytes]) -> Iterator[int]:
    return (row for row, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _differences(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, value) of what differs in two JSON values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{index}]")
    elif a != b:
        yield path, a, b
