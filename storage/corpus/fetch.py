"""Pinned files as verified bytes.

A file is read once into memory, its size and sha256 are compared with the pin, and those very bytes are what the
extractors see: nothing is opened again after the check. The cache folder, where what is not of this machine is kept by
its sha256, is trusted for nothing.
"""

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from storage.corpus import hub
from storage.corpus.download import download
from storage.corpus.spec import (
    FileList,
    HubFile,
    HubFiles,
    PinnedFile,
    PinnedTokenizer,
    PyPIFile,
    SourceSpec,
    UrlFile,
)
from storage.errors import InputFault, MissingObject, StorageError, UsageError, VerbatimError
from storage.named import open_file

Pinned = PinnedFile | PinnedTokenizer | FileList
_Fetched = PyPIFile | UrlFile | HubFile


def pinned_files(source: SourceSpec) -> list[PinnedFile]:
    """The source's files in canonical order, by name, those of hub data sets one by one.

    Raises Refused (a data set whose files have no pins), InputFault (a list of pins is not as pinned itself).
    """
    files: list[PinnedFile] = []
    for file in source.files:
        files += hub.files_of(file, _list(file)) if isinstance(file, HubFiles) else [file]
    files.sort(key=lambda file: file.name)
    for one, other in pairwise(files):
        if one.name == other.name:
            raise UsageError(f"source {source.name}: {one.name} is named twice; names are addresses and must differ")
    return files


def _list(file: HubFiles) -> bytes | None:
    return None if file.pins is None else _verified(file.pins, Path(file.pins.path))


def read_pinned(pin: Pinned, cache: Path) -> bytes:
    """The bytes of a pinned file, downloaded into `cache` if need be; InputFault if they differ from the pin."""
    if not isinstance(pin, _Fetched):
        return _verified(pin, Path(pin.path))
    if not is_here(pin, cache):
        fetch(pin, cache)
    return _verified(pin, cache / pin.sha256)


def is_here(pin: Pinned, cache: Path) -> bool:
    """Whether nothing has to be downloaded; what lies there is verified when it is read."""
    return not isinstance(pin, _Fetched) or os.path.exists(cache / pin.sha256)  # False, too, if it may not be read


def fetch(pin: Pinned, cache: Path) -> None:
    """Download a pinned file into `cache`; what came is compared with the pin first. One of this machine stays."""
    if not isinstance(pin, _Fetched):
        return
    path = cache / pin.sha256
    if isinstance(pin, PyPIFile):
        _download(pin, cache, path)
    elif isinstance(pin, HubFile):
        download(hub.url(pin.dataset, pin.revision, pin.file), pin, path, hub.token())
    else:
        download(pin.url, pin, path)


def _verified(pin: Pinned, path: Path) -> bytes:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, pin.size))  # of a longer file not all is read
            longer = size > pin.size
    except FileNotFoundError:
        raise MissingObject(
            f"there is no {path}", cause="the recipe names another folder, or the file was moved"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", cause="no permission, or not a file") from error
    found = hashlib.sha256(data).hexdigest()
    if longer or len(data) != pin.size or found != pin.sha256:
        raise InputFault(
            f"{path} differs from its pin: {size} bytes, sha256 {'of its beginning ' if longer else ''}{found}; "
            f"expected {pin.size} bytes, sha256 {pin.sha256}",
            cause="the file was changed or damaged after it was pinned",
            next_step=_repair(pin, path),
        )
    return data


def _repair(pin: Pinned, path: Path) -> str:
    if isinstance(pin, _Fetched):
        return f"delete it (rm {path}) and prepare again; it will be downloaded anew"
    return "restore the pinned file, or pin the new one in the recipe: that is another mix with another root"


def _download(pin: PyPIFile, cache: Path, target: Path) -> None:
    """Let pip fetch the one file, with its own hash check, and move it to its place in one step."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            requirement = Path(folder, "requirement.txt")
            requirement.write_text(f"{pin.package} --hash=sha256:{pin.sha256}\n")
            _pip(pin, requirement, Path(folder, "files"))
            (found,) = Path(folder, "files").iterdir()
            os.replace(found, target)
    except OSError as error:
        raise StorageError(
            f"{pin.name} could not be stored in {cache}: {error.strerror}",
            cause="the disk of the cache folder is full, or the folder may not be written",
            next_step="free some space or change the folder's owner, and run the same command again",
        ) from error


def _pip(pin: PyPIFile, requirement: Path, folder: Path) -> None:
    only = "--only-binary" if pin.format == "wheel" else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-cache-dir"]
    command += ["--disable-pip-version-check", only, ":all:", "-r", str(requirement), "-d", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return
    output = result.stdout + result.stderr
    if os.strerror(errno.ENOSPC) in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    got = re.search(r"Got\s+([0-9a-f]{64})", output)
    if got:
        raise InputFault(
            f"{pin.name}: the index serves sha256 {got.group(1)}, expected {pin.sha256}",
            cause="the pin is of another file of this release (wheel or sdist), or the index was tampered with",
            next_step=f"compare with the file digests that the index lists for {pin.package}",
        )
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-1:]
    raise VerbatimError(
        f"{pin.name} could not be downloaded: {' '.join(lines[-1:])}",
        cause="no network, no package index configured for pip, or no such release",
        next_step=f"run `{' '.join(command[:4])} --no-deps {pin.package}` and see what pip says",
    )
