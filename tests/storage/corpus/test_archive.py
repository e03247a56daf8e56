"""Archives: every form gives the same members in the same order; what is damaged or too large is one clear error."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from storage.corpus import archive
from storage.corpus.archive import members
from storage.corpus.row import Row
from storage.corpus.spec import Text
from storage.errors import InputFault
from tests.storage.corpus.mixes import extracted, write_tar, write_zip

FILES = {"./usr/b.txt": b"two", "./usr/a.txt": b"one" * 1000, "./c": b""}
MEMBERS = [(name, 0, FILES[name]) for name in sorted(FILES)]


def zst(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst, ".bz2": bz2.compress,
}  # fmt: skip


def tar(tmp_path: Path, suffix: str, files: dict[str, bytes] = FILES) -> bytes:
    return PACKERS[suffix](write_tar(tmp_path / "packed.tar", files).read_bytes())


def ar(*files: tuple[str, bytes]) -> bytes:
    data = b"!<arch>\n"
    for name, content in files:
        data += f"{name:<16}{1609459200:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        data += b"\n" * (len(content) % 2)
    return data


def deb(data: bytes, suffix: str) -> bytes:
    control = b"odd"  # so that a byte of padding follows
    return ar(("debian-binary", b"2.0\n"), ("control.tar.xz", control), (f"data.tar{suffix}", data))


def found(data: bytes, name: str = "some") -> list[tuple[str, int, bytes]]:
    return [(member, position, content()) for member, position, content in members(name, data)]


@pytest.mark.parametrize("suffix", list(PACKERS))
def test_every_form_gives_the_same_members(tmp_path: Path, suffix: str) -> None:
    packed = tar(tmp_path, suffix)
    assert found(packed) == found(deb(packed, suffix)) == MEMBERS
    assert found(write_zip(tmp_path / "zip", FILES).read_bytes()) == MEMBERS


def test_a_package_of_debian_as_it_is_built(tmp_path: Path) -> None:
    """Names may end in a slash, as `ar` of GNU writes them."""
    data = deb(tar(tmp_path, ".xz"), ".xz").replace(b"data.tar.xz     ", b"data.tar.xz/    ")
    assert found(data) == MEMBERS


@pytest.mark.parametrize("suffix", list(PACKERS))
@pytest.mark.parametrize("cut", [2, 20, 100, 110, 140, 180, 195])
def test_a_package_that_is_cut_off(tmp_path: Path, suffix: str, cut: int) -> None:
    data = deb(tar(tmp_path, suffix), suffix)
    for damaged in (data[:-cut], data[: len(b"!<arch>\ndebian-binary") + cut]):
        with pytest.raises(InputFault, match="some is not an archive that can be read"):
            found(damaged)


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda data: data.replace(b"data.tar.xz", b"date.tar.xz"), "it holds no data.tar"),
        (lambda data: data.replace(b"`\n", b"'\n"), "no member at byte 8"),
        (lambda data: data.replace(b"4         `", b"-60       `"), "no member at byte 8"),
        (lambda data: data.replace(b"4         `", b"4_0       `"), "no member at byte 8"),
        (lambda data: data.replace(b"\xfd7zXZ", b"\xfd7zXY"), ""),
        (lambda data: data[:300] + bytes(9) + data[309:], ""),
    ],
)
def test_a_damaged_package(tmp_path: Path, damaged: Callable[[bytes], bytes], said: str) -> None:
    with pytest.raises(InputFault, match=f"some is not an archive that can be read: .*{said}"):
        found(damaged(deb(tar(tmp_path, ".xz"), ".xz")))


def test_a_text_that_begins_as_an_archive_of_another_kind() -> None:
    assert found(b"!<arch>\nlibc.o/") == [("some", 0, b"!<arch>\nlibc.o/")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_an_archive_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    packed = tar(tmp_path, suffix, {str(i): b"x" * 900 for i in range(30)})
    size = len(write_tar(tmp_path / "plain.tar", {str(i): b"x" * 900 for i in range(30)}).read_bytes())
    monkeypatch.setattr(archive, "MAX_ARCHIVE", size)
    assert len(found(packed)) == len(found(deb(packed, suffix))) == 30
    monkeypatch.setattr(archive, "MAX_ARCHIVE", size - 1)
    for data in (packed, deb(packed, suffix)):
        with pytest.raises(InputFault, match=f"some unpacks to {size} bytes or more, at most {size - 1} are allowed"):
            found(data)
    monkeypatch.setattr(archive, "MAX_MEMBER", 899)
    monkeypatch.setattr(archive, "MAX_ARCHIVE", size)
    with pytest.raises(InputFault, match="some: 0 unpacks to 900 bytes or more"):
        found(deb(packed, suffix))


@pytest.mark.parametrize(("suffix", "pack"), [(".txt.gz", gzip.compress), (".txt.zst", zst)])
def test_a_packed_text(monkeypatch: pytest.MonkeyPatch, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    name, text = f"https://host/a{suffix}", "naïve 🙂\r\n" * 9000

    def read(data: bytes) -> list[Row]:
        return extracted(name, data, Text())

    assert read(pack(text.encode())) == [Row(name, 0, text)]
    half = len(text.encode()) // 2
    assert read(pack(text.encode()[:half]) + pack(text.encode()[half:])) == [Row(name, 0, text)]
    assert [row.reason for row in read(pack(b"caf\xe9"))] == ["undecodable"]
    assert [row.reason for row in read(pack(b""))] == ["empty"]
    for damaged in (pack(text.encode())[:-9], text.encode(), b"", b"BZh9"):
        with pytest.raises(InputFault, match=f"a{suffix} is not an archive that can be read"):
            read(damaged)
    monkeypatch.setattr(archive, "MAX_MEMBER", 1000)
    with pytest.raises(InputFault, match=r"at most 1000 are allowed"):
        read(pack(b"x" * 1001))
    assert [row.text for row in read(pack(b"x" * 1000))] == ["x" * 1000]
