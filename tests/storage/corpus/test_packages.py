"""Files of packages: what pip, npm and apt bring is kept if it is as pinned; all else is one clear error.

The package managers are small shell scripts here, which behave as the real ones did when they were tried.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from storage.corpus.fetch import fetch, read_pinned
from storage.corpus.spec import File
from storage.errors import InputFault, MissingObject, StorageError, VerbatimError

X = {"sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881", "size": 1}  # of b"x"
OTHER = "0" * 64
PACKAGES = {
    "pypi": {"package": "some==1.0", "format": "wheel"},
    "npm": {"package": "@scope/some@1.0.0"},
    "debian": {"package": "some=1:1.0~git1-2"},
}
TOOLS = {"pypi": "python", "npm": "npm", "debian": "apt-get"}
BRINGS = {
    "pypi": 'for last; do :; done; printf %s "$DATA" > "$last/some-1.0-py3-none-any.whl"',
    "npm": 'for last; do :; done; printf %s "$DATA" > "${last#--pack-destination=}/scope-some-1.0.0.tgz"',
    "debian": 'printf %s "$DATA" > some_1%3a1.0~git1-2_all.deb; echo "W: Download is performed unsandboxed" >&2',
}
NO_NETWORK = {
    "pypi": 'echo "WARNING: retrying"; echo "ERROR: No matching distribution found for some==1.0" >&2; exit 1',
    "npm": 'echo "npm error code ENOTFOUND\nnpm error network This is a problem related to network connectivity." >&2; '
    'echo "npm error A complete log of this run can be found in: /a/b-debug.log" >&2; exit 1',
    "debian": 'echo "E: Failed to fetch http://mirror/some.deb  Could not resolve mirror" >&2; exit 100',
}
GONE = {
    "npm": 'echo "npm error code ETARGET\nnpm error notarget No matching version found for some@1.0.0." >&2; exit 1',
    "debian": "echo \"E: Version '1:1.0~git1-2' for 'some' was not found\" >&2; exit 100",
}
KINDS = pytest.mark.parametrize("kind", list(PACKAGES))


def package(kind: str, **changes: Any) -> Any:
    fields = {"kind": kind, "licence": "MIT", "extract": {"kind": "text"}} | X | PACKAGES[kind]
    return TypeAdapter(File).validate_python(fields | changes)


class Tool:
    """A package manager whose next calls run `script`; `calls` has their arguments."""

    def __init__(self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.log = folder / "bin" / TOOLS[kind], folder / "log"
        self.path.parent.mkdir()
        monkeypatch.setenv("PATH", f"{self.path.parent}:/bin:/usr/bin")
        monkeypatch.setattr(sys, "executable", str(self.path))
        self.says(BRINGS[kind])

    def says(self, script: str, data: str = "x") -> None:
        self.path.write_text(f"#!/bin/sh\nDATA={data!r}\necho \"LC_ALL=$LC_ALL $*\" >> '{self.log}'\n{script}\n")
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def tool(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    return Tool(kind, tmp_path, monkeypatch)


@KINDS
def test_a_package_is_fetched_once_and_verified_on_every_use(kind: str, tool: Tool, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = fetch(package(kind), tmp_path / "cache", lambda done, total: told.append((done, total)))
    assert path == tmp_path / "cache" / X["sha256"] and told == [(1, 1)]
    assert [read_pinned(package(kind), tmp_path / "cache") for _ in range(2)] == [b"x", b"x"]
    assert len(tool.calls) == 1 and list((tmp_path / "cache").iterdir()) == [path]
    path.write_bytes(b"y")
    with pytest.raises(InputFault, match="differs from its pin") as error:
        read_pinned(package(kind), tmp_path / "cache")
    assert "downloaded anew" in error.value.next_step


@KINDS
def test_a_cache_named_from_here(kind: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "pypi":  # whose command names a file that is read
        tool.says(f'while [ "$1" != -r ]; do shift; done; cat "$2" > /dev/null || exit 1; {BRINGS[kind]}')
    monkeypatch.chdir(tmp_path)
    assert read_pinned(package(kind), Path("cache")) == b"x"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("pypi", ["-m pip download", "--no-deps", "--require-hashes", "--no-cache-dir", "--only-binary"]),
        ("npm", ["LC_ALL=C", "pack @scope/some@1.0.0", "--ignore-scripts"]),
        ("debian", ["LC_ALL=C", "download", "some=1:1.0~git1-2"]),
    ],
)
def test_what_is_asked_for(kind: str, tool: Tool, tmp_path: Path, options: list[str]) -> None:
    fetch(package(kind), tmp_path / "cache")
    assert all(option in tool.calls[0] for option in options), tool.calls


@KINDS
@pytest.mark.parametrize("data", ["y", "xx", ""])
def test_other_bytes_are_an_error_with_both_digests(kind: str, tool: Tool, tmp_path: Path, data: str) -> None:
    tool.says(BRINGS[kind], data)
    with pytest.raises(InputFault, match=f"serves {len(data)} bytes, sha256 [0-9a-f]{{64}}; expected 1 bytes") as error:
        fetch(package(kind), tmp_path / "cache")
    assert X["sha256"] in error.value.message and error.value.exit_code == 11 and error.value.next_step
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", ["pypi"])
def test_an_index_that_serves_another_file(tool: Tool, tmp_path: Path) -> None:
    tool.says(f'echo "ERROR: THESE PACKAGES DO NOT MATCH\n  Expected sha256 {"f" * 64}\n     Got     {OTHER}"; exit 1')
    with pytest.raises(InputFault, match=f"serves sha256 {OTHER}; expected 1 bytes, sha256 {X['sha256']}"):
        fetch(package("pypi"), tmp_path / "cache")


@KINDS
def test_no_network(kind: str, tool: Tool, tmp_path: Path) -> None:
    tool.says(NO_NETWORK[kind])
    said = {"pypi": "No matching distribution", "npm": "network connectivity", "debian": "Could not resolve mirror"}
    with pytest.raises(VerbatimError, match=said[kind]) as error:
        fetch(package(kind), tmp_path / "cache")
    assert error.value.exit_code == 1 and "no network" in error.value.cause and error.value.next_step
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("kind", list(GONE))
def test_a_release_that_is_gone(kind: str, tool: Tool, tmp_path: Path) -> None:
    tool.says(GONE[kind])
    with pytest.raises(MissingObject, match=r"could not be downloaded: .*(No matching version|was not found)") as error:
        fetch(package(kind), tmp_path / "cache")
    assert "no such release" in error.value.cause and error.value.next_step


@pytest.mark.parametrize("kind", ["npm", "debian"])
def test_a_package_manager_that_is_not_installed(
    kind: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(VerbatimError, match=f"could not be downloaded: {TOOLS[kind]} is not installed") as error:
        fetch(package(kind), tmp_path / "cache")
    assert f"install {TOOLS[kind]}" in error.value.next_step and error.value.exit_code == 1


@KINDS
def test_a_full_disk_and_a_folder_that_may_not_be_written(kind: str, tool: Tool, tmp_path: Path) -> None:
    tool.says('echo "ERROR: Could not do it: [Errno 28] No space left on device"; exit 1')
    with pytest.raises(StorageError, match="No space left on device") as error:
        fetch(package(kind), tmp_path / "cache")
    assert "free some space" in error.value.next_step and list((tmp_path / "cache").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"some.* could not be stored in .*file"):
        fetch(package(kind), tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("npm", name) for name in ("some", "some@latest", "some@^1.0.0", "--x@1.0.0", "some@1.0.0 x", "a/b@1.0.0")),
        *(("npm", name) for name in ("@a/--b@1.0.0", "some@file:x", "some@1.0.0\n")),
        *(("debian", name) for name in ("some", "-o=1", "some/stable", "some=", "some=1 -o", "some:i386=1")),
        *(("pypi", name) for name in ("some", "some>=1", "some==")),
    ],
)
def test_a_package_without_an_exact_version(kind: str, name: str) -> None:
    with pytest.raises(ValidationError, match="package"):
        package(kind, package=name)
