"""The ordered float32 reduction across ranks: moves bytes, and adds in the order of `model.ordered.replay`.

    node 0   rank 0  rank 1 ─┐  all-to-all within a node, then a running sum in ascending rank order
    node 1   rank 2  rank 3  │
    node 2   rank 4  rank 5 ─┘
                └── all-reduce between nodes: butterfly in each power-of-two block, the blocks' sums on the first

From the Open-1B report (arXiv 2609.17380): §5, figure 8, and appendix A.1 to A.3. No library adds: a collective here
only moves. Off unless a spec asks for it. A shard's share is what the ranks in its place own by `model.rows`, so that
each rank ends with its own rows, and all go on as after the exact reduction.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from torch import distributed as dist

from model.ordered import (
    Order,
    Residual,
    blocks,
    checked,
    float_add,
    micro_batch_mean,
    shard_mean,
    times_reciprocal,
)
from model.ordered_step import Gradient, Piece, cut, joined, unit
from model.rows import Ownership


class Peers(Protocol):
    """Some ranks that move arrays f32[n] among themselves, numbered 0 to size - 1; none of it adds."""

    rank: int
    size: int

    def all_to_all(self, flat: np.ndarray, counts: list[int]) -> np.ndarray:
        """Send consecutive pieces of counts[d] elements to each rank d; returns [size, counts[rank]] by sender."""

    def swap(self, peer: int, array: np.ndarray) -> np.ndarray:
        """Send to `peer`, which swaps with this rank, and return what it sent, of the same length."""

    def send(self, peer: int, array: np.ndarray) -> None:
        """Send to `peer`, which receives."""

    def receive(self, peer: int, length: int) -> np.ndarray:
        """Return what `peer` sends."""

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Return rank 0's array, of the same length."""


def rank_mean(order: Order, rank: int, rows: Ownership, gradient: Gradient) -> np.ndarray:
    """This rank's mean over its micro-batches, f32[n]: all parameters' rows, in the order of shares()."""
    pieces = [piece for share in shares(order, rows) for piece in share]
    own = (joined(pieces, gradient(unit(order, rank, index))) for index in range(order.micro_batches))
    return micro_batch_mean(own, order)


def own_mean(order: Order, rows: Ownership, node: Peers, across: Peers, mean: np.ndarray) -> dict[str, np.ndarray]:
    """This rank's own rows of the step's mean gradient by parameter, f32, from all ranks' rank_mean()."""
    cuts = shares(order, rows)
    counts = [sum(piece.size for piece in share) for share in cuts]
    share = ordered_mean(order, node, across, mean, counts)
    own, others = owned(rows, order.rank(across.rank, node.rank)), range(across.rank)
    before = sum(piece.size for replica in others for piece in owned(rows, order.rank(replica, node.rank)))
    return dict(cut(own, share[before:]))


def shares(order: Order, rows: Ownership) -> list[list[Piece]]:
    """What each shard reduces: the rows that its ranks own, replica by replica."""
    ranks = [[order.rank(replica, shard) for replica in range(order.replicas)] for shard in range(order.shards)]
    return [[piece for rank in group for piece in owned(rows, rank)] for group in ranks]


def owned(rows: Ownership, rank: int) -> list[Piece]:
    """The rows of a rank."""
    own = rows.own(rank).items()
    return [Piece(name, part, (part.stop - part.start, *rows.shapes[name][1:])) for name, part in own]


def ordered_mean(order: Order, node: Peers, across: Peers, mean: np.ndarray, counts: list[int]) -> np.ndarray:
    """This rank's share of the step's mean gradient, f32: counts[node.rank] elements of what `replay` returns.

    `mean` is this rank's own over its micro-batches, f32[Σ counts], alike on all ranks. `node` are the ranks of its
    replica by shard, `across` those of its shard by replica. Raises ValueError where these are not those of `order`.
    """
    if (across.size, node.size) != (order.replicas, order.shards):
        raise ValueError(
            f"the order is of {order.replicas} replicas × {order.shards} shards, the ranks are {across.size} ×"
            f" {node.size}; another world gives other bits: start {order.world} processes, in groups of {order.shards}"
        )
    # All-to-all within a node, then A.2's running sum.
    share = shard_mean(node.all_to_all(checked(mean), counts), order)
    return times_reciprocal(all_reduce_sum(across, share, order.residual), order.replicas)


def all_reduce_sum(across: Peers, part: np.ndarray, residual: Residual) -> np.ndarray:
    """The sum over replicas of part f32[n], on each of them the same bits: A.1's tree. `part` may be overwritten.

    A butterfly within the blocks of `blocks(size)`, in ⌈log₂⌉ swaps; then, where there is more than one block, their
    first ranks hand their sums on, and rank 0, where they meet, broadcasts.
    """
    heads = [block.start for block in blocks(across.size)]
    block = next(block for block in blocks(across.size) if across.rank in block)
    place, step = across.rank - block.start, 1
    while step < len(block):
        other = across.swap(block.start + (place ^ step), part)
        # The lower replica is on the left on both sides, so that they agree on a NaN's bits too.
        part = float_add(other, part) if place & step else float_add(part, other)
        step *= 2
    if len(heads) == 1:
        return part
    if across.rank in heads:
        part = _joined_blocks(across, part, heads, residual)
    return across.broadcast(part)


def _joined_blocks(across: Peers, part: np.ndarray, heads: list[int], residual: Residual) -> np.ndarray:
    """On rank 0 the sum of all blocks; on another block's first rank, some part of it that it has handed on."""
    index = heads.index(across.rank)
    if residual == "left_fold":
        senders, receiver = (heads[1:] if index == 0 else []), heads[0]
    else:
        senders, receiver = heads[index + 1 : index + 2], heads[index - 1]
    for sender in senders:
        part = float_add(part, across.receive(sender, len(part)))
    if index > 0:
        across.send(receiver, part)
    return part


class TorchPeers:
    """The ranks of a process group of torch.distributed whose backend moves host memory, such as gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.sent = group, 0  # bytes that left this rank
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, flat: np.ndarray, counts: list[int]) -> np.ndarray:
        received = np.empty((self.size, counts[self.rank]), np.float32)
        self.sent += 4 * (len(flat) - counts[self.rank])
        dist.all_to_all_single(
            torch.from_numpy(received.reshape(-1)),
            torch.from_numpy(np.ascontiguousarray(flat)),
            [counts[self.rank]] * self.size,
            counts,
            group=self._group,
        )
        return received

    def swap(self, peer: int, array: np.ndarray) -> np.ndarray:
        other = np.empty_like(array)
        self.sent += array.nbytes
        sent = dist.isend(torch.from_numpy(array), group=self._group, group_dst=peer)
        received = dist.irecv(torch.from_numpy(other), group=self._group, group_src=peer)
        for work in (sent, received):
            if work is not None:
                work.wait()
        return other

    def send(self, peer: int, array: np.ndarray) -> None:
        self.sent += array.nbytes
        dist.send(torch.from_numpy(array), group=self._group, group_dst=peer)

    def receive(self, peer: int, length: int) -> np.ndarray:
        array = np.empty(length, np.float32)
        dist.recv(torch.from_numpy(array), group=self._group, group_src=peer)
        return array

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        self.sent += array.nbytes * (self.size - 1) if self.rank == 0 else 0
        dist.broadcast(torch.from_numpy(array), group=self._group, group_src=0)
        return array


def mesh_peers(order: Order, limit: timedelta) -> tuple[TorchPeers, TorchPeers]:
    """This process's `node` and `across`, ranks being replica-major; every process must call it, as it makes groups.
    limit: how long one of them waits for another at most.

    Raises ValueError where the number of processes is not that of `order`.
    """
    world = dist.get_world_size()
    if world != order.world:
        raise ValueError(
            f"the order is of {order.replicas} replicas × {order.shards} shards = {order.world} ranks, {world}"
            f" processes run; another world gives other bits: start {order.world} (--nproc-per-node)"
        )
    replica, shard = divmod(dist.get_rank(), order.shards)
    replicas, shards = range(order.replicas), range(order.shards)
    nodes = [_group([order.rank(r, s) for s in shards], limit) for r in replicas]
    acrosses = [_group([order.rank(r, s) for r in replicas], limit) for s in shards]
    return TorchPeers(nodes[replica]), TorchPeers(acrosses[shard])


def _group(ranks: list[int], limit: timedelta) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=limit, backend="gloo")
