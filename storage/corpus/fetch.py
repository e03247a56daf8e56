"""Pinned files as verified bytes.

A file is read once into memory, its size and sha256 are compared with the pin, and those very bytes are what the
extractors see: nothing is opened again after the check. The cache folder, where what is not of this machine is kept by
its sha256, is trusted for nothing.
"""

import hashlib
import os
from itertools import pairwise
from pathlib import Path

from storage.corpus import hub
from storage.corpus.download import Tell, download
from storage.corpus.packages import download_package
from storage.corpus.spec import (
    FileList,
    HubFile,
    HubFiles,
    PackageFile,
    PinnedFile,
    PinnedTokenizer,
    SourceSpec,
    UrlFile,
)
from storage.errors import InputFault, MissingObject, StorageError, UsageError
from storage.named import open_file

Pinned = PinnedFile | PinnedTokenizer | FileList
_Fetched = PackageFile | UrlFile | HubFile


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


def fetch(pin: Pinned, cache: Path, tell: Tell = lambda done, total: None) -> Path:
    """Where the pinned file lies; one that is not of this machine is first downloaded into `cache` if it is absent.

    It is not held in memory, and what lies there already is not looked at: read_pinned verifies whatever is used.
    tell(done, total): how many of its bytes are there, now and then while it comes.
    """
    if not isinstance(pin, _Fetched):
        return Path(pin.path)
    path = cache / pin.sha256
    if os.path.exists(path):  # False, too, in a folder that may not be read
        return path
    if isinstance(pin, PackageFile):
        download_package(pin, path)
        tell(pin.size, pin.size)
    elif isinstance(pin, HubFile):
        download(hub.url(pin.dataset, pin.revision, pin.file), pin, path, hub.token(), tell)
    else:
        download(pin.url, pin, path, None, tell)
    return path


def read_pinned(pin: Pinned, cache: Path) -> bytes:
    """The bytes of a pinned file, downloaded into `cache` if need be; InputFault if they differ from the pin."""
    return _verified(pin, fetch(pin, cache))


def is_here(pin: Pinned, cache: Path) -> bool:
    """Whether nothing has to be downloaded; what lies there is verified when it is read."""
    return not isinstance(pin, _Fetched) or os.path.exists(cache / pin.sha256)  # False, too, if it may not be read


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
