"""Ranks, simulated: who works on which units, in which groups, and how their sums would be joined by a library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from model import host
from model import step as steps
from model.group import Group
from model.transformer import Network, unit_gradients

Sums = dict[str, Any]


@contextmanager
def simulated(world: int, accumulate: int = 1) -> Iterator[None]:
    """The step function as `world` ranks would run it: rank r takes the units r, r + world, …, `accumulate` at a time.

    Each group of units has sums of its own; a rank adds its groups, and the ranks' sums are added last.
    """

    def joined(net: Network, windows: np.ndarray, flag: Any, group: Group) -> tuple[Sums, int, int]:
        size = net.spec.numerics.unit_windows
        units = [windows[first : first + size] for first in range(0, len(windows), size)]
        results = [_rank(net, units[rank::world], accumulate, flag) for rank in range(world)]
        sums = _zeros(net)
        for own, _ in reversed(results):
            _add(sums, own)
        return sums, sum(nll for _, (nll, _) in results), sum(lse2 for _, (_, lse2) in results)

    with mock.patch.object(steps, "_accumulate", joined):
        yield


def _rank(net: Network, units: list[np.ndarray], accumulate: int, flag: Any) -> tuple[Sums, tuple[int, int]]:
    two_z, totals = host.f32(2 * host.exact(net.spec.optimizer.z_loss)), (0, 0)
    own = _zeros(net)
    for first in range(0, len(units), accumulate):
        group = _zeros(net)
        for unit in units[first : first + accumulate]:
            nll, lse2 = unit_gradients(net, unit, two_z, group, flag)
            totals = totals[0] + nll, totals[1] + lse2
        _add(own, group)
    return own, totals


def _zeros(net: Network) -> Sums:
    backend: ModuleType = net.backend
    return {name: backend.new_sums(shape) for name, shape in net.spec.model.shapes().items()}


def _add(sums: Sums, others: Sums) -> None:
    for name, other in others.items():
        sums[name] += other


def ring(parts: Sequence[np.ndarray], chunks: int) -> np.ndarray:
    """The sum as a ring of len(parts) ranks makes it: each chunk starts at another rank, and so has its own order."""
    pieces = [np.array_split(part, chunks) for part in parts]
    result = []
    for chunk in range(chunks):
        total = pieces[chunk % len(parts)][chunk].copy()
        for hop in range(1, len(parts)):
            total += pieces[(chunk + hop) % len(parts)][chunk]
        result.append(total)
    return np.concatenate(result)


def tree(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum by pairs, as a tree makes it."""
    if len(parts) == 1:
        return parts[0].copy()
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:])
