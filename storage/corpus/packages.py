"""Pinned files out of packages: pip, npm and apt fetch them, as they are configured on this machine.

The package manager writes into a folder beside the target; what it brought gets its name only with the pinned bytes.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from storage.corpus.download import storing
from storage.corpus.spec import DebianFile, NpmFile, PackageFile, PyPIFile
from storage.errors import InputFault, MissingObject, VerbatimError


class _Manager(NamedTuple):
    """A call that puts one file into a folder, and how to speak of it."""

    command: list[str]
    place: str  # where it looks
    gone: str  # a pattern of what it says where there is no such release
    advice: str
    error: str  # a pattern of the lines that say what is wrong


def download_package(pin: PackageFile, target: Path) -> None:
    """Fetch the one file of the package to `target`.

    Raises InputFault (another file is served: both digests), MissingObject (no such release), StorageError (the disk),
    else VerbatimError (no network, or the package manager is missing or fails).
    """
    with (
        storing(pin.name, target.parent),
        tempfile.TemporaryDirectory(dir=target.parent.resolve(), prefix=".download-") as folder,
    ):
        files = Path(folder, "files")
        files.mkdir()
        _run(pin, _manager(pin, Path(folder), files), files)
        (found,) = files.iterdir()
        _check(pin, found)
        os.replace(found, target)


def _manager(pin: PackageFile, folder: Path, files: Path) -> _Manager:
    if isinstance(pin, PyPIFile):
        return _pip(pin, folder, files)
    return _npm(pin, folder, files) if isinstance(pin, NpmFile) else _apt(pin)


def _pip(pin: PyPIFile, folder: Path, files: Path) -> _Manager:
    """pip builds an sdist's metadata when it downloads it: it checks the digest before it runs any of it."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{pin.package} --hash=sha256:{pin.sha256}\n")
    only = "--only-binary" if pin.format == "wheel" else "--no-binary"
    pip = [sys.executable, "-m", "pip", "download"]
    command = [*pip, "--no-deps", "--require-hashes", "--no-cache-dir", "--disable-pip-version-check", only, ":all:"]
    return _Manager(
        command=[*command, "-r", str(requirement), "-d", str(files)],
        place="package index configured for pip",
        gone="(?!)",  # it says the same where there is no network
        advice=f"run `{' '.join(pip)} --no-deps {pin.package}` and see what pip says",
        error="^ERROR",
    )


def _npm(pin: NpmFile, folder: Path, files: Path) -> _Manager:
    npm = ["npm", "pack", pin.package]
    options = ["--ignore-scripts", "--no-update-notifier", "--loglevel=error", f"--cache={folder / 'cache'}"]
    return _Manager(
        command=[*npm, *options, f"--pack-destination={files}"],
        place="registry configured for npm",
        gone=r"\b(E404|ETARGET)\b",
        advice=f"run `{' '.join(npm)}` and see what npm says",
        error=r"^npm (error|ERR!) (?!A complete log)",
    )


def _apt(pin: DebianFile) -> _Manager:
    return _Manager(
        command=["apt-get", "download", "--quiet", pin.package],
        place="mirror configured for apt",
        gone=r"^E: (Version .* was not found|Unable to locate package)",
        advice="run `apt-get update` as root and prepare again; a release that a later one replaced leaves the mirror",
        error="^E:",
    )


def _run(pin: PackageFile, manager: _Manager, files: Path) -> None:
    tool = manager.command[0]
    if shutil.which(tool) is None:
        raise VerbatimError(
            f"{pin.name} could not be downloaded: {tool} is not installed",
            cause=f"files of kind {pin.kind} are fetched by {tool}",
            next_step=f"install {tool}, or copy the file to this machine and pin it as kind local",
        )
    english = os.environ | {"LC_ALL": "C"}
    result = subprocess.run(manager.command, cwd=files, env=english, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    output = result.stdout + result.stderr
    if os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    got = re.search(r"Got\s+([0-9a-f]{64})", output) if isinstance(pin, PyPIFile) else None
    if got:
        raise _differs(pin, f"sha256 {got[1]}")
    lines = [line for line in output.splitlines() if re.search(manager.error, line)] or output.splitlines()[-1:]
    gone = re.search(manager.gone, output, re.MULTILINE) is not None
    said = f"{pin.name} could not be downloaded: {' '.join(lines[-1:])}"
    if gone:
        raise MissingObject(said, cause=f"the {manager.place} has no such release any more", next_step=manager.advice)
    raise VerbatimError(said, cause=f"no network, no {manager.place}, or no such release", next_step=manager.advice)


def _check(pin: PackageFile, path: Path) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if (size := path.stat().st_size) != pin.size or found != pin.sha256:
        raise _differs(pin, f"{size} bytes, sha256 {found}")


def _differs(pin: PackageFile, found: str) -> InputFault:
    return InputFault(
        f"{pin.name}: the index serves {found}; expected {pin.size} bytes, sha256 {pin.sha256}",
        cause="the pin is of another file of this release, or the index was tampered with",
        next_step=f"compare with the file digests that the index lists for {pin.package}",
    )
