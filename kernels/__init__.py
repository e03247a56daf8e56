"""The arithmetic contract: each operation of a training step, defined in NumPy and made fast on each device.

`kernels.reference` is the definition. A backend gives the same bytes, which `kernels.conformance` checks on any
machine.
"""

import importlib
from types import ModuleType

from kernels.interface import CONTRACT

HOSTS = ("cpu", "reference")  # these run on every machine
BACKENDS = (*HOSTS, "nvidia")
GENERIC = "generic:"  # followed by a torch device
CHECKED = "checked:"  # followed by a backend, whose every output is then held to the contract

__all__ = ["BACKENDS", "CONTRACT", "HOSTS", "backend", "vectors_digest"]


def backend(name: str) -> ModuleType:
    """The backend module of that name; raises ValueError for an unknown one."""
    if name.startswith(CHECKED):
        inner = name.removeprefix(CHECKED)
        if inner.startswith(CHECKED):
            raise ValueError(f"backend {name[:80]!r}: {CHECKED} stands once, before a backend's name")
        checked: ModuleType = importlib.import_module("kernels.checked").Checked(backend(inner))
        return checked
    if name.startswith(GENERIC):
        return importlib.import_module("kernels.generic").on(name.removeprefix(GENERIC))
    if name not in BACKENDS:
        known = f"{', '.join(BACKENDS)}, {GENERIC}<torch device>, {CHECKED}<any of these>"
        raise ValueError(f"no backend is called {name!r}; there are: {known}")
    try:
        return importlib.import_module(f"kernels.{name}")
    except ImportError as error:
        raise ValueError(f"backend {name!r} does not run on this machine: {error}") from error


def vectors_digest() -> str:
    """The digest of the committed conformance vectors, which a run's header names."""
    from kernels.conformance import vectors_digest as digest_of_vectors

    return digest_of_vectors()
