from pathlib import Path
from typing import Any

import pytest

from kernels import canonical
from storage.corpus.fetch import pinned_files, read_pinned
from storage.corpus.spec import LocalFile, SourceSpec
from storage.errors import InputFault, MissingObject, Refused, UsageError
from tests.storage.corpus.mixes import pin, small


def local(path: Path) -> LocalFile:
    return LocalFile.model_validate(pin(path))


def test_a_changed_file_is_an_error_that_shows_both_digests(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")
    pinned = local(path)
    assert read_pinned(pinned, tmp_path) == b"before"
    for changed in (b"beforf", b"befor", b"before and after", b""):
        path.write_bytes(changed)
        with pytest.raises(InputFault) as error:
            read_pinned(pinned, tmp_path)
        assert pinned.sha256 in error.value.message and f"{len(changed)} bytes" in error.value.message
        assert error.value.exit_code == 11 and error.value.cause and error.value.next_step


def test_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    pinned = local(tmp_path / "a")
    (tmp_path / "a").unlink()
    with pytest.raises(MissingObject, match="there is no"):
        read_pinned(pinned, tmp_path)


def hub_files(**changes: Any) -> SourceSpec:
    fields = {
        "kind": "hub_files",
        "dataset": "a/b",
        "revision": "0" * 40,
        "licence": "MIT",
        "extract": {"kind": "rows"},
    }
    return SourceSpec.model_validate({"name": "s", "files": [fields | changes]})


def listed(path: Path, value: Any) -> dict[str, Any]:
    """The pin of a list of pins that is written there."""
    path.write_bytes(value if isinstance(value, bytes) else canonical.dumps(value))
    about = pin(path)
    return {name: about[name] for name in ("path", "size", "sha256")}


def test_a_hub_data_set_is_refused_until_its_files_are_pinned() -> None:
    with pytest.raises(Refused, match="a/b at commit 000000000000 cannot be prepared"):
        pinned_files(hub_files())


NAMES = ("data/b.parquet", "data/a.parquet", "README.md", "data/deep/c.parquet")


def test_the_files_of_a_hub_data_set_come_from_its_list_in_the_order_of_names(tmp_path: Path) -> None:
    pins = listed(tmp_path / "pins.json", [{"file": name, "sha256": "a" * 64, "size": 5} for name in NAMES])
    files = pinned_files(hub_files(include=["data/*"], pins=pins))
    assert [file.name for file in files] == [f"a/b@{'0' * 40}/data/{name}.parquet" for name in ("a", "b", "deep/c")]
    assert {(file.sha256, file.size, file.licence, file.extract.kind) for file in files} == {
        ("a" * 64, 5, "MIT", "rows")
    }
    with pytest.raises(InputFault, match="of the 4 files of its list none matches"):
        pinned_files(hub_files(include=["*.zst"], pins=pins))


def test_the_list_itself_is_pinned_and_its_folder_is_no_part_of_the_mix(tmp_path: Path) -> None:
    value = [{"file": "a.parquet", "sha256": "a" * 64, "size": 5}]
    here = listed(tmp_path / "pins.json", value)
    (tmp_path / "there").mkdir()
    there = listed(tmp_path / "there" / "pins.json", value)
    specs = [small(tmp_path, sources=[hub_files(pins=pins).model_dump()]) for pins in (here, there)]
    assert specs[0].digest() == specs[1].digest()
    assert specs[0].public().sources[0].files[0].pins.path == "pins.json"  # type: ignore[union-attr]
    (tmp_path / "pins.json").write_bytes(canonical.dumps([value[0] | {"size": 6}]))
    with pytest.raises(InputFault, match="differs from its pin"):
        pinned_files(hub_files(pins=here))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"[ ]", "not canonical"),
        ({}, "valid list"),
        ([{"file": "a", "size": 1}], "sha256"),
        ([{"file": "/a", "size": 1, "sha256": "a" * 64}], "file"),
        ([{"file": "a", "size": -1, "sha256": "a" * 64}], "size"),
        ([{"file": "a", "size": 1, "sha256": "A" * 64}], "sha256"),
    ],
)
def test_a_list_that_is_none(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(InputFault, match=f"its list of pins is none: .*{said}"):
        pinned_files(hub_files(pins=listed(tmp_path / "pins.json", value)))


def test_a_file_that_is_listed_twice(tmp_path: Path) -> None:
    entry = {"file": "a", "sha256": "a" * 64, "size": 5}
    with pytest.raises(UsageError, match="a is named twice"):
        pinned_files(hub_files(pins=listed(tmp_path / "pins.json", [entry, entry])))
