"""An arm64 Linux under user-mode emulation: Debian's packages and aarch64 wheels, unpacked below runs/arm64.

    root/     Debian bookworm's packages for arm64, unpacked, not installed: the C library and Python 3.11
    site/     the wheels of arm64.txt, whose versions and hashes are pinned
    numba/    what Numba compiled there, by the kernels' digest

QEMU translates every instruction of a process and takes the C library from root/, so nothing here needs root but the
installation of QEMU itself. Debian's packages are verified by the archive's signature, wheels by their hashes.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from flows.environment import kernels_digest

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "runs" / "arm64"
WHEELS = Path(__file__).with_name("arm64.txt")
SUITE = "bookworm"  # its Python is 3.11, which the wheels are for
PYTHON = "usr/bin/python3.11"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
# int8 dot products, no SVE. QEMU's "max" raises floating-point flags that no processor raises.
PROCESSOR = "cortex-a76"
QEMU = ("qemu-aarch64-static", "qemu-aarch64")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")  # what the archive's signature is verified with
TOOLS = {  # Debian package: its programs
    "qemu-user-static": QEMU,
    "debootstrap": ("debootstrap",),
    "dpkg": ("dpkg",),
    "apt": ("apt-get",),
}


class NotPossible(Exception):
    """Why this machine cannot emulate arm64, with the command that would change it."""


def missing() -> str:
    """Why no emulated process can start; empty if one can."""
    if not _ready().is_file() or _ready().read_text(encoding="ascii") != _wanted():
        return "make arm64 prepares it"
    return "" if _which(*QEMU) else f"no {QEMU[0]}: make arm64 installs it"


def command() -> list[str]:
    """What starts the emulated Python; its arguments follow."""
    return [_which(*QEMU) or QEMU[0], "-cpu", PROCESSOR, "-L", str(FOLDER / "root"), str(FOLDER / "root" / PYTHON)]


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """`outer` with the emulated Python's own folders, so that it finds nothing of this machine's."""
    own = {
        "PYTHONHOME": str(FOLDER / "root" / "usr"),
        "PYTHONPATH": os.pathsep.join((str(PROJECT), str(FOLDER / "site"))),
        "NUMBA_CACHE_DIR": str(FOLDER / "numba" / kernels_digest()[:16]),
        # LLVM would read the processor's name from /proc/cpuinfo, which is this machine's.
        "NUMBA_CPU_NAME": PROCESSOR,
        "NUMBA_CPU_FEATURES": "+neon",
    }
    return {**outer, **own}


def prepare() -> None:
    """Fetch and unpack everything, once; NotPossible says what is missing. About a minute and 1.1 GB."""
    _install_tools()
    if not missing():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    _unpack_debian(FOLDER / "root")
    _unpack_wheels(FOLDER / "site")
    _ready().write_text(_wanted(), encoding="ascii")


def mirror(targets: str) -> str:
    """The first Debian mirror among apt's sources, given as lines of "URI|origin|label"; NotPossible without one."""
    sources = [line.split("|") for line in targets.splitlines()]
    for uri, *publisher in sources:
        if publisher == ["Debian", "Debian"] and uri.startswith(("http:", "https:")):
            return uri
    raise NotPossible(
        f"none of apt's sources is a mirror of Debian, which has {SUITE} for arm64; found: "
        f"{', '.join(sorted({uri for uri, *_ in sources})) or 'none'}; "
        "add one to /etc/apt/sources.list.d, then: apt-get update && make arm64"
    )


def _install_tools() -> None:
    """QEMU and debootstrap from this machine's own packages, where that is allowed."""
    packages = [package for package, programs in TOOLS.items() if not _which(*programs)]
    packages += [] if KEYRING.is_file() else ["debian-archive-keyring"]
    if not packages:
        return
    if os.geteuid() != 0 or "apt" in packages:
        raise NotPossible(
            f"the arm64 emulation needs {', '.join(packages)} of Debian or the like, which this machine lacks, and "
            f"this user may not install them; try: sudo apt-get install {' '.join(packages)} && make arm64"
        )
    print(f"Installing {', '.join(packages)} ...", flush=True)
    _call("apt-get", "update", "-qq")
    _call("apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages)


def _unpack_debian(root: Path) -> None:
    """The packages of a minimal Debian with Python, unpacked and not configured: no program of theirs runs here."""
    targets = _call("apt-get", "indextargets", "--format", "$(REPO_URI)|$(ORIGIN)|$(LABEL)", "Created-By: Packages")
    print(f"Fetching Debian {SUITE} for arm64 ...", flush=True)
    options = ("--download-only", "--force-check-gpg", "--arch=arm64", "--variant=minbase", "--include=python3")
    _call("debootstrap", *options, SUITE, str(root), mirror(targets))
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        _call("dpkg", "-x", str(package), str(root))
        package.unlink()


def _unpack_wheels(site: Path) -> None:
    print("Fetching wheels for aarch64 ...", flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--python-version=3.11", "--quiet"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    what = ["--target", str(site), "-r", str(WHEELS)]
    _call(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, *platforms, *what)


def _call(program: str, *arguments: str) -> str:
    """A program's output; NotPossible with the end of what it said if it fails."""
    done = subprocess.run([_which(program) or program, *arguments], capture_output=True, text=True)
    if done.returncode:
        said = (done.stdout + done.stderr)[-800:]
        raise NotPossible(f"{program} {' '.join(arguments[:3])} … ended with {done.returncode}:\n{said}")
    return done.stdout


def _which(*programs: str) -> str | None:
    """The first of them that is installed; debootstrap lies in a folder that only root searches."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))
    return next((found for program in programs if (found := shutil.which(program, path=path))), None)


def _ready() -> Path:
    """Written last, so that a half-prepared folder is prepared anew."""
    return FOLDER / "ready"


def _wanted() -> str:
    """What a prepared folder holds."""
    return hashlib.sha256(WHEELS.read_bytes() + SUITE.encode()).hexdigest()
