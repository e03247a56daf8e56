"""Documents out of the verified bytes of a file.

An extractor yields every row it meets, in the file's own order, and what becomes of it: a text, or the reason why it is
skipped. Members of an archive are taken by name (code points), rows by position: (file, member, position) is a
document's address. Nothing is unpacked to disk.
"""

import html
import io
import json
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from storage.corpus.archive import BROKEN, inflated, members
from storage.corpus.blobs import blob_rows
from storage.corpus.row import MAX_MEMBER, Row, check_size, nested
from storage.corpus.spec import Botocore, Extract, Factbook, Metamath, Text, WordNet
from storage.corpus.table import table_rows

SHORT = 200  # characters: an operation with less documentation says nothing but its name


def rows(name: str, data: bytes, how: Extract, cache: Path) -> Iterator[Row]:
    """All rows of the file `name` with content `data`; of whatever kind, a text of white space alone is "empty".

    cache: where texts are kept that the file only names.
    """
    extractors: dict[str, Callable[..., Iterator[Row]]] = {
        "text": _text, "botocore": _botocore, "factbook": _factbook, "wordnet": _wordnet, "metamath": _metamath,
        "rows": table_rows, "software_heritage": partial(blob_rows, cache=cache),
    }  # fmt: skip
    return (_checked(name, row) for row in extractors[how.kind](name, data, how))


def _checked(name: str, row: Row) -> Row:
    if row.text is None:
        return row
    if not row.text.strip():
        return row._replace(text=None, reason="empty")
    try:
        size = len(row.text.encode())
    except UnicodeEncodeError:  # a lone surrogate out of a JSON escape
        return row._replace(text=None, reason="undecodable")
    check_size(f"text {row.position} of {row.member or name}", size, MAX_MEMBER)
    return row


def _text(name: str, data: bytes, how: Text) -> Iterator[Row]:
    for member, position, content in members(name, data):
        chosen = any(fnmatchcase(member, glob) for glob in how.include)
        if not chosen or any(fnmatchcase(member, glob) for glob in how.exclude):
            yield Row(member, position, None, "not selected")
            continue
        try:
            yield Row(member, position, content().decode())
        except UnicodeDecodeError:
            yield Row(member, position, None, "undecodable")


def _botocore(name: str, data: bytes, how: Botocore) -> Iterator[Row]:
    for member, _, content in members(name, data):
        if not member.endswith("/service-2.json.gz"):
            yield Row(member, 0, None, "not selected")
            continue
        try:
            service = _parsed(inflated(content(), f"{name}: {member}", MAX_MEMBER))
            texts = [plain(service.get("documentation", "")), *_operations(service)]
        except (*BROKEN, AttributeError, KeyError, TypeError):
            yield Row(member, 0, None, "malformed")
            continue
        for position, text in enumerate(texts):
            short = position and 0 < len(text) <= SHORT
            yield Row(member, position, None if short else text, "short" if short else "")


def _operations(service: dict[str, Any]) -> Iterator[str]:
    for _, operation in sorted(service["operations"].items()):
        shape = service["shapes"].get(operation.get("input", {}).get("shape"), {})
        members = shape.get("members", {}).items()
        texts = [f"{name}: {plain(about['documentation'])}" for name, about in members if about.get("documentation")]
        yield "\n".join([plain(operation.get("documentation", "")), *texts]).strip()


def _factbook(name: str, data: bytes, how: Factbook) -> Iterator[Row]:
    for member, position, content in members(name, data):
        if not member.endswith(".json"):
            yield Row(member, position, None, "not selected")
            continue
        try:
            fields = list(_fields(_parsed(content()), ()))
        except ValueError:
            yield Row(member, position, None, "malformed")
            continue
        yield Row(member, position, "\n".join(f"{heading}: {plain(text)}" for heading, text in fields))


def _parsed(data: bytes) -> Any:
    if nested(data):
        raise ValueError("nested too deep")
    return json.loads(data)


def _fields(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(headings, text) of every field of a profile that has a text, in the profile's order."""
    if not isinstance(value, dict):
        return
    if isinstance(value.get("text"), str):
        yield " / ".join(path), value["text"]
    for heading, inner in value.items():
        yield from _fields(inner, (*path, heading))


_GLOSSES = re.compile(r"(?:.*/)?dict/data\.(noun|verb|adj|adv)")


def _wordnet(name: str, data: bytes, how: WordNet) -> Iterator[Row]:
    for member, position, content in members(name, data):
        found = _GLOSSES.fullmatch(member)
        if not found:
            yield Row(member, position, None, "not selected")
            continue
        for line, entry in enumerate(io.BytesIO(content())):
            yield _gloss(Row(member, line, None), entry, found[1])


def _gloss(row: Row, entry: bytes, part: str) -> Row:
    """A line: offset, file, type, count of words in hex, each word and a digit, count of pointers …, "|", the gloss."""
    if entry.startswith(b"  "):
        return row._replace(reason="licence header")
    try:
        fields, bar, gloss = entry.decode().partition("|")
        _, _, _, digits, *rest = fields.split()
        count = int(digits, 16)
    except UnicodeDecodeError:
        return row._replace(reason="undecodable")
    except ValueError:
        return row._replace(reason="malformed")
    if not bar or not 0 < 2 * count < len(rest):
        return row._replace(reason="malformed")
    words = [word.replace("_", " ") for word in rest[: 2 * count : 2]]
    return row._replace(text=f"{', '.join(words)} ({part}): {gloss.strip()}" if gloss.strip() else "")


_COMMENT = re.compile(rb"^(?=[ \t]*\$\([ \t\r\n])", re.MULTILINE)


def _metamath(name: str, data: bytes, how: Metamath) -> Iterator[Row]:
    for member, position, content in members(name, data):
        if not any(fnmatchcase(member, glob) for glob in how.include):
            yield Row(member, position, None, "not selected")
            continue
        before, *blocks = _COMMENT.split(content())
        if before:
            yield Row(member, 0, None, "no comment")
        for block, text in enumerate(blocks, 1):
            try:
                yield Row(member, block, text.decode())
            except UnicodeDecodeError:
                yield Row(member, block, None, "undecodable")


_BLOCK = re.compile(r"</?(?:p|li|ul|ol|dl|dt|dd|br|div|h[1-6]|tr|table|note|important)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[A-Za-z][^>]*>")
_SPACES = "\t\r\f\v\xa0"


def plain(markup: str) -> str:
    """HTML as lines of text: blocks begin a line, other tags vanish, entities become characters."""
    text = html.unescape(_TAG.sub("", _BLOCK.sub("\n", markup)))
    for space in _SPACES:
        text = text.replace(space, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    return "\n".join(filter(None, (line.strip(" ") for line in text.split("\n")))).strip()
