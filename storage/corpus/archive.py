"""The members of an archive: a zip, a tar (plain, .gz, .xz, .zst) or a Debian package. None is unpacked to disk."""

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from storage.corpus.row import MAX_ARCHIVE, MAX_MEMBER, check_size
from storage.errors import InputFault

Member = tuple[str, int, Callable[[], bytes]]  # name, which of that name, content

# What the libraries raise for an archive that is damaged.
BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, OSError, RuntimeError, ValueError),
)
_DEBIAN = b"!<arch>\ndebian-binary"
_AR, _AR_HEADER = len(b"!<arch>\n"), 60
_INFLATE: dict[bytes, Callable[[io.BytesIO], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"\xfd7zXZ\x00": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda file: pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"),
}


def members(name: str, data: bytes) -> Iterator[Member]:
    """The members of the archive `name` in order of names, or the file itself. InputFault if it cannot be read."""
    stream = io.BytesIO(data)
    with _readable(name):
        if data.startswith(_DEBIAN):
            yield from _of_tar(name, _debian_data(name, data))
            return
        if zipfile.is_zipfile(stream):
            with zipfile.ZipFile(stream) as archive:
                files = [member for member in archive.infolist() if not member.is_dir()]
                yield from _in_order([(m.filename, partial(_zip_read, name, archive, m)) for m in files])
            return
        if _is_tar(data):
            yield from _of_tar(name, inflated(data, name, MAX_ARCHIVE))
            return
    yield name, 0, partial(_alone, name, data)


def _is_tar(data: bytes) -> bool:
    if data.startswith(b"\x28\xb5\x2f\xfd"):  # which this Python's tarfile does not know
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as file:
            data = file.read(tarfile.BLOCKSIZE)
    return tarfile.is_tarfile(io.BytesIO(data))


def _alone(name: str, data: bytes) -> bytes:
    """The content of a file that is no archive."""
    if not name.endswith((".txt.gz", ".txt.zst")):
        return data
    with _readable(name):
        if not data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            raise ValueError("it is not compressed as its name says")
        return inflated(data, name, MAX_MEMBER)


def _of_tar(name: str, data: bytes) -> Iterator[Member]:
    # Names without a word of their encoding are UTF-8 in any locale, and those that are not are names too.
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="backslashreplace") as tar:
        files = [member for member in tar.getmembers() if member.isfile()]
        yield from _in_order([(file.name, partial(_tar_read, name, tar, file)) for file in files])


def _debian_data(name: str, data: bytes) -> bytes:
    """The tar archive of the package's files: the member data.tar, data.tar.gz, .xz or .zst of an ar archive."""
    at = _AR
    while at < len(data):
        header = data[at : at + _AR_HEADER]
        size = header[48:58].strip()
        if header[58:] != b"`\n" or not size.isdigit():
            raise ValueError(f"there is no member at byte {at}")
        start, end = at + _AR_HEADER, at + _AR_HEADER + int(size)
        if end > len(data):
            raise EOFError(f"a member of {int(size)} bytes begins at byte {start} of {len(data)}")
        if header.startswith(b"data.tar"):
            return inflated(data[start:end], name, MAX_ARCHIVE)
        at = end + int(size) % 2
    raise ValueError("it holds no data.tar")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """InputFault for what the archive libraries raise: at the list of members, and again at each member's content."""
    try:
        yield
    except BROKEN as error:
        raise InputFault(
            f"{name} is not an archive that can be read: {error}",
            cause="pinned as it is, but cut off, damaged, encrypted or of an unknown compression",
        ) from error


def inflated(data: bytes, name: str, limit: int) -> bytes:
    """Compression removed at once, because seeking in a compressed tar by name would inflate it again and again."""
    opener = next((opener for magic, opener in _INFLATE.items() if data.startswith(magic)), None)
    if opener is None:
        return data
    pieces, size = [], 0
    with opener(io.BytesIO(data)) as file:
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


def _in_order(found: list[tuple[str, Callable[[], bytes]]]) -> Iterator[Member]:
    seen: dict[str, int] = {}
    for name, content in sorted(found, key=lambda item: item[0]):  # stable: equal names stay in archive order
        position = seen[name] = seen.get(name, -1) + 1
        yield name, position, content
