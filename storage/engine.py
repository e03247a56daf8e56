"""The only place where storage takes the arithmetic from: one step function, one initial state, one evaluation."""

import time
from collections.abc import Callable
from types import ModuleType

import numpy as np

import kernels
from kernels.conformance import self_test as _self_test
from kernels.reference.fingerprint import fingerprint as reference_fingerprint
from kernels.warm import warm
from model.spec import RunSpec
from model.state import State, initial_state
from model.step import StepRecord, Summed, clip_factor, each_unit, evaluate, gradient_scale, mean_losses, step, update
from storage.errors import MachineFault, Refused, UsageError
from storage.processes import cores

__all__ = ["State", "StepRecord", "Summed", "check_arithmetic", "clip_factor", "each_unit", "evaluate", "fingerprint",
           "gradient_scale", "initial_state", "load_backend", "mean_losses", "self_test", "step", "update"]  # fmt: skip


EVERY = 5.0  # seconds between two words on a self-test
# The module that is missing, None for a device → likely cause, next command.
ABSENT = {
    "triton": (
        "Triton is not installed: PyTorch's builds for CUDA bring it, those for processors alone do not",
        ".venv/bin/python -m pip install -c constraints.txt triton",
    ),
    None: (
        "there is no NVIDIA GPU, its driver is not installed, or PyTorch was built for processors alone",
        "nvidia-smi shows the GPUs that the driver sees; without one use --backend cpu, which gives the same bits",
    ),
}


def fingerprint(tensor: np.ndarray, seed: int, purpose: str) -> int:
    """φ of int64[...]: kernels/reference/fingerprint.py says what it is, Numba computes it, whatever the backend."""
    from kernels.cpu.fingerprint import fingerprint  # not before it is needed: a machine may lack Numba

    return fingerprint(tensor, seed, purpose)


def load_backend(name: str) -> ModuleType:
    """The backend of that name; UsageError for another, or where this machine lacks what it needs."""
    try:
        return kernels.backend(name)
    except ValueError as error:
        reason, absent = error.__cause__, ("", "")
        if isinstance(reason, ImportError):
            absent = ABSENT.get(reason.name, ("a package that the backend needs is not installed", "make install"))
        raise UsageError(str(error), cause=absent[0], next_step=absent[1]) from None


def self_test(name: str, report: Callable[[str], None] = lambda text: None) -> None:
    """MachineFault unless this backend reproduces every conformance vector on this machine, and fingerprints are right.

    report: how far it is, every few seconds; kernels are compiled at the first use, which may take minutes.
    """
    backend = load_backend(name)
    warm(backend, cores(), _told("compiled", report))
    if failing := [*_self_test(backend, _told("compared", report)), *_wrong_fingerprint()]:
        raise MachineFault(
            f"backend {name} fails {len(failing)} conformance vectors here: {', '.join(failing[:5])}",
            cause="faulty memory or processor, or a dependency of another version",
            next_step="make install, then verbatim doctor; if it still fails, use another machine",
        )


def _wrong_fingerprint() -> list[str]:
    """["fingerprint"] where Numba's is not the reference's, of numbers up to the bound and more than one block."""
    tensor = np.arange(1 << 14 | 5, dtype=np.int64) * 0x3D4D51C2D82B14B1 >> 3  # wraps, as it should
    try:
        found = fingerprint(tensor, 7, "self-test")
    except ImportError:  # without Numba no fingerprint is ever made here
        return []
    return [] if found == reference_fingerprint(tensor, 7, "self-test") else ["fingerprint"]


def _told(what: str, report: Callable[[str], None]) -> Callable[[int, int], None]:
    """Reports vectors done at most every EVERY seconds, and the time left at the pace since the first of them."""
    first: list[float] = []  # when, and how many were done then
    said = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal said
        now = time.monotonic()
        if not first:
            first[:] = now, done
        elif done < of and now - said >= EVERY:
            said, left = now, (now - first[0]) / (done - first[1]) * (of - done)
            report(f"self-test: {done} of {of} vectors {what}, about {left:.0f} s left")

    return tell


def check_arithmetic(spec: RunSpec, processes: int = 1) -> None:
    """Refused unless the installed kernels implement the spec's contract, by the same conformance vectors, and so many
    processes may share its steps."""
    for what, asked, installed in (
        ("contract", spec.contract, kernels.CONTRACT),
        ("conformance vectors", spec.vectors, kernels.vectors_digest()),
    ):
        if asked != installed:
            raise Refused(
                f"the run's {what} is {asked}, the installed kernels' is {installed}",
                cause="this version computes by other rules than the run was begun with",
                next_step="install the version that the run's release names",
            )
    try:
        spec.numerics.reduction.check_processes(processes)
    except ValueError as error:
        raise Refused(f"{spec.name}: {error}", next_step="set plan.processes in the recipe, and train again") from None
