"""What really runs here: code, dependency lock, installed versions, machine.

The header of a ledger declares code and lock; segment records and certificates say what was found. None of it enters
a state: an auditor's code need not be equal, only its conformance digests must.
"""

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path, PurePath

import kernels
from kernels import canonical
from kernels.digest import digest
from storage.errors import VerbatimError
from storage.processes import cores
from storage.records import Digest, Record, Text
from storage.store import object_digest

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "kernels", "model", "storage")
# Everything that could change a bit, or the form of what is written.
DISTRIBUTIONS = ("blake3", "cryptography", "fastokens", "llvmlite", "mpmath", "numba", "numpy", "pyarrow", "pydantic",
                 "tokenizers", "torch", "verbatim-audit-training")  # fmt: skip


class Provenance(Record):
    """What produced a segment or a certificate."""

    backend: Text
    details: dict[str, Text | int]  # what the backend says of itself: its device, its way to exact products, threads
    device: Text  # the processor
    threads: int
    system: Text
    versions: dict[str, Text]
    code: Digest
    lock: Digest
    contract: Text
    conformance: Digest


def provenance(backend: str) -> Provenance:
    """What runs in this process with this backend; ValueError for an unknown one."""
    return Provenance(
        backend=backend,
        details=kernels.backend(backend).describe(),
        device=_processor(),
        threads=cores(),
        system=platform.platform(),
        versions={"python": platform.python_version()} | {name: version(name) for name in DISTRIBUTIONS},
        code=code_digest(),
        lock=lock_digest(),
        contract=kernels.CONTRACT,
        conformance=kernels.vectors_digest(),
    )


def code_files() -> dict[str, Path]:
    """Every source file, committed table and part of a page of the five packages, by its path in the project."""
    files = (path for name in PACKAGES for path in (PROJECT / name).rglob("*") if is_code(path))
    return {path.relative_to(PROJECT).as_posix(): path for path in files}


def is_code(path: PurePath) -> bool:
    """Whether a file of the five packages counts: caches and the like do not."""
    return path.suffix in (".py", ".json", ".html", ".css", ".js")


def code_digest() -> str:
    """Digest over path and content of code_files()."""
    return digest_of_code({name: object_digest(path.read_bytes()) for name, path in code_files().items()})


def digest_of_code(files: Mapping[str, str]) -> str:
    """code_digest(), of the object digests of files by their paths."""
    return digest(canonical.dumps(dict(files)), "code")


def lock_digest() -> str:
    """Digest of constraints.txt, the exact version of every dependency."""
    path = PROJECT / "constraints.txt"
    try:
        return object_digest(path.read_bytes())
    except OSError as error:
        raise VerbatimError(
            f"{path} cannot be read: {error.strerror}",
            cause="the project was not installed from its own folder",
            next_step="install it with: make install",
        ) from None


def version(name: str) -> str:
    """The installed version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
