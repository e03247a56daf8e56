"""Documents out of the verified bytes of a file.

An extractor yields every row it meets, in the file's own order, and what becomes of it: a text, or the reason why it is
skipped. Members of an archive are taken by name (code points), rows by position: (file, member, position) is a
document's address. Nothing is unpacked to disk.
"""

import gzip
import html
import io
import json
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from storage.corpus.row import MAX_ARCHIVE, MAX_MEMBER, Row, check_size, nested
from storage.corpus.spec import Botocore, Factbook, Rows, SoftwareHeritage, Text
from storage.corpus.table import table_rows
from storage.errors import InputFault, Refused

SHORT = 200  # characters: an operation with less documentation says nothing but its name


def rows(name: str, data: bytes, how: Text | Botocore | Factbook | Rows | SoftwareHeritage) -> Iterator[Row]:
    """All rows of the file `name` with content `data`; of whatever kind, a text of white space alone is "empty"."""
    extractors: dict[str, Callable[..., Iterator[Row]]] = {
        "text": _text, "botocore": _botocore, "factbook": _factbook, "rows": table_rows, "software_heritage": _blobs,
    }  # fmt: skip
    return (_checked(row) for row in extractors[how.kind](name, data, how))


def _checked(row: Row) -> Row:
    if row.text is None:
        return row
    if not row.text.strip():
        return row._replace(text=None, reason="empty")
    try:
        row.text.encode()
    except UnicodeEncodeError:  # a lone surrogate out of a JSON escape
        return row._replace(text=None, reason="undecodable")
    return row


def _text(name: str, data: bytes, how: Text) -> Iterator[Row]:
    for member, position, content in _members(name, data):
        chosen = any(fnmatchcase(member, glob) for glob in how.include)
        if not chosen or any(fnmatchcase(member, glob) for glob in how.exclude):
            yield Row(member, position, None, "not selected")
            continue
        try:
            yield Row(member, position, content().decode())
        except UnicodeDecodeError:
            yield Row(member, position, None, "undecodable")


def _botocore(name: str, data: bytes, how: Botocore) -> Iterator[Row]:
    for member, _, content in _members(name, data):
        if not member.endswith("/service-2.json.gz"):
            yield Row(member, 0, None, "not selected")
            continue
        try:
            service = _parsed(_inflated(content(), f"{name}: {member}", MAX_MEMBER))
            texts = [plain(service.get("documentation", "")), *_operations(service)]
        except (ValueError, OSError, EOFError, zlib.error, AttributeError, KeyError, TypeError):
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
    for member, position, content in _members(name, data):
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


def _blobs(name: str, data: bytes, how: SoftwareHeritage) -> Iterator[Row]:
    raise Refused(f"{name}: fetching blobs from Software Heritage is not built yet")


def _members(name: str, data: bytes) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """(member name, which of that name, content) of a zip or tar archive in order of names; else the file itself."""
    stream = io.BytesIO(data)
    with _readable(name):
        if zipfile.is_zipfile(stream):
            with zipfile.ZipFile(stream) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                yield from _in_order([(m.filename, partial(_zip_read, name, archive, m)) for m in members])
            return
        stream.seek(0)
        if tarfile.is_tarfile(stream):
            stream.seek(0)
            with tarfile.open(fileobj=io.BytesIO(_inflated(data, name, MAX_ARCHIVE))) as tar:
                files = [member for member in tar.getmembers() if member.isfile()]
                yield from _in_order([(_utf8(file.name), partial(_tar_read, name, tar, file)) for file in files])
            return
    yield name, 0, lambda: data


_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """InputFault for what the archive libraries raise: at the list of members, and again at each member's content."""
    try:
        yield
    except _BROKEN as error:
        raise InputFault(
            f"{name} is not an archive that can be read: {error}",
            cause="pinned as it is, but cut off, damaged, encrypted or of an unknown compression",
        ) from error


def _inflated(data: bytes, name: str, limit: int) -> bytes:
    """Gzip removed once, because seeking in a compressed tar by name would inflate it again and again."""
    if data[:2] != b"\x1f\x8b":
        return data
    pieces, size = [], 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while piece := file.read(16 << 20):
            pieces.append(piece)
            check_size(name, size := size + len(piece), limit)
    return b"".join(pieces)


def _zip_read(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with _readable(f"{name}: {member.filename}"):
        check_size(f"{name}: {member.filename}", member.file_size, MAX_MEMBER)  # no more than that is inflated
        return archive.read(member)


def _tar_read(name: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    with _readable(f"{name}: {member.name}"):
        check_size(f"{name}: {member.name}", member.size, MAX_MEMBER)
        content = tar.extractfile(member)
        return content.read() if content else b""


def _utf8(name: str) -> str:
    """The name with each byte that is not UTF-8 written out: caf\\udce9."""
    return name.encode(errors="backslashreplace").decode()


def _in_order(found: list[tuple[str, Callable[[], bytes]]]) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    seen: dict[str, int] = {}
    for name, content in sorted(found, key=lambda item: item[0]):  # stable: equal names stay in archive order
        position = seen[name] = seen.get(name, -1) + 1
        yield name, position, content


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
