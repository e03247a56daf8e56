"""Whose turn it is on a device: long work waits for a slot of the limit device-<backend>, where there is one.

`make serve` makes the limits; the page Concurrency of the UI shows and changes them. Without a limit nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.concurrency.sync import concurrency

PREFIX = "device-"
# Slots at first: two trainings of a size that is worth a GPU do not fit into its memory.
SLOTS = {"cpu": 2, "nvidia": 1, "reference": 2}
LEASE = 60.0  # seconds after which the slot of a process that was killed is free


@contextmanager
def turn(backend: str) -> Iterator[None]:
    """Around the work. A slot that is lost meanwhile, with its server, ends no work."""
    with concurrency(f"{PREFIX}{backend}", lease_duration=LEASE, raise_on_lease_renewal_failure=False):
        yield
