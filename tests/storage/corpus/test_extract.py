import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from storage.corpus import documents, extract
from storage.corpus.documents import choose_held_out, held_out_key, held_out_name, normalised
from storage.corpus.extract import Row, plain, rows
from storage.corpus.spec import Botocore, Factbook, SourceSpec, Text
from storage.errors import InputFault
from storage.store import MemoryStore
from tests.storage.corpus.mixes import collect, pin, prepared, prose, write_tar, write_zip


def source(*files: dict[str, object]) -> SourceSpec:
    return SourceSpec.model_validate({"name": "s", "files": list(files)})


def test_lines_that_are_no_document_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [
        b'{"text": "kept", "score": 3}',
        b'{"text": "too low", "score": 2}',
        b'{"text": "no score"}',
        b'{"text": "score is text", "score": "3"}',
        b'{"text": "  \\n ", "score": 3}',
        b'{"text": 5, "score": 3}',
        b'{"score": 3}',
        b'{"text": "\\ud800", "score": 3}',
        b'{"text": "caf\xe9", "score": 3}',
        b"[1, 2]",
        b"",
        b'{"text": "cut off in the midd',
    ]
    path.write_bytes(b"\n".join(lines))
    how = {"kind": "rows", "where": "score >= 3", "columns": {"score": "BIGINT"}}
    texts, skipped = collect(source(pin(path, **how)), tmp_path)
    assert texts == ["kept"]
    assert skipped == {"filtered": 2, "empty": 3, "malformed": 4, "undecodable": 2}
    assert 1 + sum(skipped.values()) == len(lines)


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_members_come_by_name_whatever_their_order_in_the_archive(tmp_path: Path, write) -> None:  # type: ignore[no-untyped-def]
    members = {
        "b/2.txt": b"two\r\n",
        "a/x.py": b"x = 1",
        "b/10.txt": b"ten",
        "b/test/t.txt": b"no",
        "é.txt": b"caf\xe9",
    }
    how = Text(include=("*.txt",), exclude=("*/test/*",))
    found = []
    for order in (members, dict(reversed(members.items()))):
        path = write(tmp_path / "archive", order)
        found.append(list(rows("archive", path.read_bytes(), how)))
    assert found[0] == found[1]
    assert found[0] == [
        Row("a/x.py", 0, None, "not selected"),
        Row("b/10.txt", 0, "ten"),
        Row("b/2.txt", 0, "two\r\n"),
        Row("b/test/t.txt", 0, None, "not selected"),
        Row("é.txt", 0, None, "undecodable"),
    ]


def test_a_file_that_is_no_archive_is_one_text() -> None:
    assert list(rows("plain.txt", b"hello", Text())) == [Row("plain.txt", 0, "hello")]


def test_a_cut_off_archive_is_one_clear_error(tmp_path: Path) -> None:
    data = write_tar(tmp_path / "a.tar.gz", {"a.txt": b"text" * 10_000}).read_bytes()
    with pytest.raises(InputFault, match=r"a\.tar\.gz is not an archive that can be read"):
        list(rows("a.tar.gz", data[:-20], Text()))


def test_botocore(tmp_path: Path) -> None:
    service = {
        "documentation": "<p>Stores &amp; finds.</p>",
        "operations": {
            "Put": {"documentation": "<p>Puts.</p>" + "<b>long</b> " * 60, "input": {"shape": "PutIn"}},
            "Get": {"documentation": "<p>Gets.</p>"},
            "Old": {},
        },
        "shapes": {"PutIn": {"members": {"Key": {"documentation": "<p>The key.</p>"}, "Bare": {}}}},
    }
    good = gzip.compress(json.dumps(service).encode())
    members = {"d/z/1/service-2.json.gz": good, "d/a/1/service-2.json.gz": good[:30], "d/z/1/other.json": b"{}"}
    found = list(rows("w", write_zip(tmp_path / "w", members).read_bytes(), Botocore()))
    assert [(row.member[2], row.position, row.reason) for row in found] == [
        *(("a", 0, "malformed"), ("z", 0, "not selected"), ("z", 0, "")),
        *(("z", 1, "short"), ("z", 2, "empty"), ("z", 3, "")),
    ]
    assert found[2].text == "Stores & finds."
    assert (
        found[5].text is not None and found[5].text.startswith("Puts.\nlong long") and "Key: The key." in found[5].text
    )


def test_factbook(tmp_path: Path) -> None:
    profile = {"Geography": {"Area": {"total": {"text": "10 sq km<br>rank 3"}, "note": {"text": "small"}}}, "x": [1]}
    members = {"data/aa.json": json.dumps(profile).encode(), "data/bb.json": b"{", "README": b"."}
    found = list(rows("w", write_zip(tmp_path / "w", members).read_bytes(), Factbook()))
    assert [row.reason for row in found] == ["not selected", "", "malformed"]
    assert found[1].text == "Geography / Area / total: 10 sq km\nrank 3\nGeography / Area / note: small"


def test_plain() -> None:
    markup = "<p>a  &lt;b&gt;</p>\n\n<ul> <li>one</li><li>two\u00a0three</li></ul> if x < 3 and y > 2"
    assert plain(markup) == "a <b>\none\ntwo three\nif x < 3 and y > 2"


def test_a_source_without_documents_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(InputFault, match="source s has no documents") as error:
        prepared(tmp_path, MemoryStore(str(tmp_path)), sources=[source(pin(tmp_path / "empty.txt"))])
    assert "empty" in error.value.message and error.value.next_step


def test_equal_texts_are_held_out_together_and_long_ones_last() -> None:
    texts = [f"text number {i}" for i in range(50)]
    texts += ["  text  number\n3 ", "text number 3"]  # the same text three times
    tokens = np.full(52, 10)
    tokens[5] = 13  # more than an eighth of 100
    assert normalised("e\u0301 \n x") == normalised("\u00e9 x")
    chosen = [choose_held_out(names(seed, texts), tokens, 100) for seed in range(60)]
    assert all(100 <= tokens[some].sum() < 130 for some in chosen)
    assert {len({3, 50, 51} & set(some.tolist())) for some in chosen} == {0, 3}
    assert not any(5 in some for some in chosen)
    assert choose_held_out(names(0, texts), tokens, 523).size == 52
    assert choose_held_out(names(0, texts), tokens, 524).size == 0


def names(seed: int, texts: list[str]) -> np.ndarray:
    digests = b"".join(held_out_name(held_out_key(seed), text) for text in texts)
    return np.frombuffer(digests, ">u8").reshape(-1, 4).astype(np.uint64)


def test_of_many_documents_the_smallest_digests_are_found_without_looking_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice among a few thousand of the smallest digests is the choice among all, however long the texts are."""
    draw = np.random.default_rng(5)
    for wanted in (100, 3_000, 40_000, 10**9):
        some = names(wanted, [str(i % 19_000) for i in range(20_000)])
        tokens = draw.integers(1, 40, 20_000)
        tokens[draw.integers(0, 20_000, 9_000)] = 4_000  # too long to be taken first where few are wanted
        monkeypatch.setattr(documents, "FEW", 4096)
        few = choose_held_out(some, tokens, wanted)
        monkeypatch.setattr(documents, "FEW", 10**9)
        assert few.tolist() == choose_held_out(some, tokens, wanted).tolist()


def texts(path: Path, **how: object) -> list[str]:
    return collect(source(pin(path, **({"kind": "text"} | how))), path.parent)[0]


def test_a_member_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "MAX_MEMBER", 1000)
    monkeypatch.setattr(extract, "MAX_ARCHIVE", 20_000)
    assert texts(write_zip(tmp_path / "good.zip", {"a": b"x" * 1000})) == ["x" * 1000]
    for path in (
        write_zip(tmp_path / "bomb.zip", {"a": b"x" * 1001}),
        write_tar(tmp_path / "bomb.tar", {"a": b"x" * 1001}),
    ):
        with pytest.raises(InputFault, match=f"{path.name}: a unpacks to 1001 bytes or more, at most 1000 are allowed"):
            texts(path)
    with pytest.raises(InputFault, match=r"many.tar.gz unpacks to \d+ bytes or more, at most 20000"):
        texts(write_tar(tmp_path / "many.tar.gz", {str(i): b"x" * 900 for i in range(30)}))
    member = {"a/service-2.json.gz": gzip.compress(b" " * 2000)}
    with pytest.raises(InputFault, match=r"service-2.json.gz unpacks to 2000 bytes or more"):
        texts(write_zip(tmp_path / "b.zip", member), kind="botocore")


@pytest.mark.parametrize(("places", "said"), [("0,0", "unpacks to 1125899906842624 bytes"), ("", "not an archive")])
def test_a_sparse_member_is_as_large_as_it_says(tmp_path: Path, places: str, said: str) -> None:
    info = tarfile.TarInfo("a")
    sparse = {"major": "0", "minor": "1", "name": "a", "size": str(1 << 50), "numblocks": "0", "map": places}
    info.pax_headers = {f"GNU.sparse.{name}": value for name, value in sparse.items()}
    with tarfile.open(tmp_path / "sparse.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(InputFault, match=said):
        texts(tmp_path / "sparse.tar")


@pytest.mark.parametrize("place", [b"PK\x01\x02", b"PK\x03\x04"])
@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 99), (16, 0)])
def test_a_member_that_cannot_be_read(tmp_path: Path, place: bytes, offset: int, value: int) -> None:
    """Encrypted, of an unknown compression, or with another checksum: the list of members is sound, one is not."""
    path = write_zip(tmp_path / "member.zip", {"a": b"text of a member"})
    data = bytearray(path.read_bytes())
    at = data.index(place) + offset - (2 if place == b"PK\x03\x04" else 0)
    data[at] = value if data[at] != value else value + 1
    path.write_bytes(data)
    try:
        assert texts(path) == ["text of a member"]  # of the two headers, one decides
    except InputFault as error:
        assert "member.zip" in error.message


@pytest.mark.parametrize("kind", ["botocore", "factbook"])
def test_json_nested_without_end_is_malformed(tmp_path: Path, kind: str) -> None:
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    name = {"botocore": "a/service-2.json.gz", "factbook": "a.json"}[kind]
    path = write_zip(tmp_path / "deep.zip", {name: gzip.compress(deep) if kind == "botocore" else deep})
    assert collect(source(pin(path, kind=kind)), tmp_path) == ([], {"malformed": 1})


def test_a_member_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """Old archives name files in Latin-1: such a byte is written out, and the name is a name like any other."""
    path = tmp_path / "latin.tar"
    with tarfile.open(path, "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
        for i in range(60):
            info = tarfile.TarInfo(f"caf\xe9{i:02d}.txt")
            info.size = len(data := prose(i, 40).encode())
            tar.addfile(info, io.BytesIO(data))
    assert [row.member for row in rows("a", path.read_bytes(), Text())][:1] == ["caf\\udce900.txt"]
    sources = [{"name": "texts", "files": [pin(path)]}]
    prepared(tmp_path, MemoryStore(str(tmp_path)), sources=sources, held_out_windows=5)
