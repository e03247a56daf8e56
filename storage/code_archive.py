"""The code as a release holds it: one tar, the same bytes from the same files wherever and whenever it is made.

    code/<code digest>.tar    what the code digest covers, and what is needed to install it
    code/constraints.txt      the dependency lock

No compression, whose bytes depend on a library's version; no time, owner or mode of this machine. So a digest of the
archive pins its files, and whoever has it can make it again.
"""

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath

from storage.errors import InputFault, VerbatimError
from storage.objects import SEGMENT
from storage.provenance import PACKAGES, PROJECT, code_files, digest_of_code, is_code
from storage.store import object_digest

LOCK = "constraints.txt"
LOCK_KEY = f"code/{LOCK}"
MAX_ARCHIVE = 64 << 20
# To install the packages, and to say how, by whom and for what: no part of the code digest.
BESIDE = ("pyproject.toml", "README.md", "LICENSE", LOCK)
RECIPES = "deployments/recipes"


def archive_key(code: str) -> str:
    """Where the archive of the code with this digest lies."""
    return f"code/{code}.tar"


def source_files() -> dict[str, bytes]:
    """The files of this installation by their paths in the project. VerbatimError where one cannot be read."""
    recipes = {path.relative_to(PROJECT).as_posix(): path for path in (PROJECT / RECIPES).iterdir() if path.is_file()}
    paths = code_files() | recipes | {name: PROJECT / name for name in BESIDE}
    try:
        return {name: path.read_bytes() for name, path in paths.items()}
    except OSError as error:
        raise VerbatimError(
            f"{error.filename} cannot be read: {error.strerror}; it belongs to the code that a release holds",
            cause="the project was not installed from its own folder",
            next_step="install it with: make install",
        ) from None


def code_of(files: Mapping[str, bytes]) -> str:
    """The code digest of an archive's files."""
    paths = (PurePosixPath(name) for name in files)
    covered = [str(path) for path in paths if path.parts[0] in PACKAGES and is_code(path)]
    return digest_of_code({name: object_digest(files[name]) for name in covered})


def pack(files: Mapping[str, bytes]) -> bytes:
    """The archive of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(files[name]), 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    return buffer.getvalue()


def unpack(data: bytes, where: str) -> dict[str, bytes]:
    """The files of an archive, nothing written; InputFault unless `data` is exactly what pack() makes of them."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if content is None or not _plain(member.name) or member.name in files:
                    raise ValueError(f"it holds {member.name!r}, which is no plain file of a project")
                files[member.name] = content.read()
        if pack(files) != data:
            raise ValueError("it is not the one archive of its files: order, owners, times or padding differ")
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise InputFault(
            f"{where}: {error}",
            cause="the archive was made by another program, or edited",
            next_step="do not unpack it",
        ) from None
    return files


def _plain(name: str) -> bool:
    """Whether unpacking it writes below the folder in which it is done, and its name shows what it is."""
    return all(SEGMENT.match(part) for part in name.split("/"))
