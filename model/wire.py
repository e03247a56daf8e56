"""How arrays travel between ranks: as torch tensors, over gloo between processors or over NCCL between GPUs.

    Host      int64 pieces go to their owners all-to-all, who add them: gloo's own reduce-scatter is five times as slow
    Device    NCCL's reduce-scatter of int64, which adds on the way; pieces are filled up to one length

Both stage what they send, so that beside the sums there is memory for a part of them alone. Everything else is
gathered as bytes: no float is added, and no device or library decides a bit.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 gave both a new name.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
STAGED = {"cpu": 1 << 22, "cuda": 1 << 26}  # int64 values that a rank sends at a time


class Wire(Protocol):
    """Between the ranks of a process group. Tensors lie on `device`; every rank makes the same calls."""

    device: torch.device

    def meet(self) -> None:
        """Return when every rank has come here."""

    def settle(self) -> None:
        """Return when what was asked of the device is done."""

    def reduce_scatter(self, flat: Tensor, counts: list[int]) -> Tensor:
        """This rank's piece of the sum of all ranks' i64 arrays, cut into pieces of these lengths, one a rank."""

    def all_gather(self, mine: Tensor) -> Tensor:
        """u8[ranks, n] of every rank's u8[n]."""


class Host:
    """Between processors, over the default group."""

    device = torch.device("cpu")

    def meet(self) -> None:
        """What is exchanged next waits for every rank."""

    def settle(self) -> None:
        """Everything is done."""

    def reduce_scatter(self, flat: Tensor, counts: list[int]) -> Tensor:
        """Each rank sends every owner its piece; the owner adds them."""
        rank, size = dist.get_rank(), dist.get_world_size()
        result, starts = flat.new_empty(counts[rank]), _starts(counts)
        step = max(1, STAGED["cpu"] // size)
        for first in range(0, max(counts), step):
            sizes = [max(0, min(step, count - first)) for count in counts]
            cuts = [flat[start + first :][:length] for start, length in zip(starts, sizes)]
            mine = sizes[rank]
            parts = flat.new_empty((size, mine))
            dist.all_to_all_single(parts.view(-1), torch.cat(cuts), [mine] * size, sizes)
            torch.sum(parts, 0, dtype=torch.int64, out=result[first : first + mine])
        return result

    def all_gather(self, mine: Tensor) -> Tensor:
        """As asked."""
        return _all_gather(mine, None)


class Device:
    """Between devices, over a process group that is NCCL's for GPUs. What ranks say to each other goes over the default
    group, which knows when one of them has ended; NCCL would wait."""

    def __init__(self, device: torch.device, group: Any) -> None:
        self.device, self.group = device, group

    def meet(self) -> None:
        """Wait for the other ranks."""
        dist.barrier()

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def reduce_scatter(self, flat: Tensor, counts: list[int]) -> Tensor:
        """By parts of all pieces: while one is on its way, the next is copied together."""
        size, longest, starts = len(counts), max(counts), _starts(counts)
        result, step = flat.new_empty(longest), max(1, STAGED[self.device.type] // size)
        under_way: list[tuple[Any, Tensor]] = []  # a part lives until it was sent
        for first in range(0, longest, step):
            width = min(step, longest - first)
            part = flat.new_empty((size, width))
            for row, start, count in zip(part, starts, counts):
                length = max(0, min(width, count - first))
                row[:length] = flat[start + first :][:length]
                row[length:] = 0
            target = result[first : first + width]
            work = REDUCE_SCATTER(target, part.view(-1), group=self.group, async_op=True)
            under_way.append((work, part))
            if len(under_way) > 1:
                under_way.pop(0)[0].wait()
        for work, _ in under_way:
            work.wait()
        return result[: counts[dist.get_rank(self.group)]]

    def all_gather(self, mine: Tensor) -> Tensor:
        """As asked."""
        return _all_gather(mine, self.group)


def _all_gather(mine: Tensor, group: Any) -> Tensor:
    size = dist.get_world_size(group)
    found = mine.new_empty((size, len(mine)))
    ALL_GATHER(found.view(-1), mine, group=group)
    return found


def _starts(counts: list[int]) -> list[int]:
    return list(accumulate(counts[:-1], initial=0))
