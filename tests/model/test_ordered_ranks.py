"""The ordered reduction across ranks gives the bytes of its replay: many ranks as threads, a few as gloo processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from model import ordered_ranks
from model.ordered import Order, Residual, micro_batch_mean, replay
from model.ordered_ranks import Peers, all_reduce_sum, ordered_mean
from tests.model import wide
from tests.model.mailboxes import on_all_ranks

LIMIT = timedelta(minutes=1)
LENGTHS = (67, 3)  # neither divides by 2 to 8; with 3 some shards own nothing
WORLD_6 = [Order(3, 2, 2, "left_fold"), Order(2, 3, 1, "left_fold"), Order(6, 1, 1, "left_fold")]
WORLD_7 = [Order(7, 1, 2, residual) for residual in get_args(Residual)]


def share_of(order: Order, rank: int, node: Peers, across: Peers, length: int = LENGTHS[0]) -> np.ndarray:
    own = micro_batch_mean((wide.gradient(rank, index, length) for index in range(order.micro_batches)), order)
    counts = [share.stop - share.start for share in shares(length, order.shards)]
    return ordered_mean(order, node, across, own, counts)


def shares(length: int, shards: int) -> list[slice]:
    """Equal pieces; the last shards have less, or nothing."""
    size = -(-length // shards)
    return [slice(min(shard * size, length), min((shard + 1) * size, length)) for shard in range(shards)]


def expected(order: Order, length: int = LENGTHS[0]) -> list[bytes]:
    """The share of every rank, cut from the replay: all replicas end with the same."""
    whole = replay(order, lambda rank, index: wide.gradient(rank, index, length))
    return [whole[share].tobytes() for share in shares(length, order.shards)] * order.replicas


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("replicas", range(1, 10))
def test_threads_give_the_bytes_of_the_replay(replicas: int, shards: int) -> None:
    for residual in get_args(Residual):
        order = Order(replicas, shards, 1 + (replicas + shards) % 3, residual)
        for length in LENGTHS:
            found = on_all_ranks(order, partial(share_of, order, length=length))
            assert [share.tobytes() for share in found] == expected(order, length), (order, length)


def test_the_residual_is_that_of_the_order() -> None:
    one, other = (on_all_ranks(order, partial(share_of, order)) for order in WORLD_7)
    assert one[0].tobytes() != other[0].tobytes()


def test_places_of_ranks_count() -> None:
    """Were the ranks of a node taken in another order, or nodes and shards mistaken for each other, the bits differ."""
    order = Order(3, 3, 1, "left_fold")

    def swapped(rank: int, node: Peers, across: Peers) -> np.ndarray:
        return share_of(order, rank, across, node)

    def moved(rank: int, node: Peers, across: Peers) -> np.ndarray:
        return share_of(order, (rank + 1) % 9, node, across)

    tasks: list[Callable[[int, Peers, Peers], np.ndarray]] = [partial(share_of, order), swapped, moved]
    assert len({b"".join(share.tobytes() for share in on_all_ranks(order, task)[:3]) for task in tasks}) == 3


def test_all_replicas_agree_on_nan_and_infinity() -> None:
    """The bits of a NaN follow the operand on the left, which is the lower replica's on both sides of a swap."""
    order = Order(8, 1, 1, "left_fold")  # one block: nothing is broadcast that would make them agree
    bits = np.array([0x7FC00001, 0x7FC00002, 0xFFC00003, 0x7F800000, 0xFF800000, 0x3F800000], np.uint32)

    def summed(rank: int, node: Peers, across: Peers) -> bytes:
        with np.errstate(invalid="ignore"):
            part = np.tile(np.roll(bits, rank), 11).view(np.float32)
            return all_reduce_sum(across, part, order.residual).tobytes()

    assert len(set(on_all_ranks(order, summed))) == 1


def test_another_world_is_refused() -> None:
    order = Order(2, 2, 1, "left_fold")

    def task(rank: int, node: Peers, across: Peers) -> None:
        with pytest.raises(ValueError, match=r"4 replicas × 1 shards, the ranks are 2 × 2; .* start 4 processes"):
            share_of(Order(4, 1, 1, "left_fold"), rank, node, across)

    on_all_ranks(order, task)


@pytest.mark.parametrize("orders", [WORLD_6, WORLD_7], ids=["world 6", "world 7"])
def test_gloo_processes_give_the_bytes_of_the_replay(orders: list[Order], tmp_path: Path) -> None:
    world = orders[0].world
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch.distributed"])  # torch is imported once, not by each rank
    ranks = [context.Process(target=gloo_rank, args=(rank, orders, tmp_path)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0] * world
    for index, order in enumerate(orders):
        found = [(tmp_path / f"{index}.{rank}").read_bytes() for rank in range(world)]
        both = zip(*(expected(order, length) for length in LENGTHS), strict=True)
        assert found == [b"".join(shares) for shares in both], order


def gloo_rank(rank: int, orders: list[Order], folder: Path) -> None:
    """One process: writes its shares of each order's mean, and sees another world refused."""
    import torch.distributed as dist

    world = orders[0].world
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    for index, order in enumerate(orders):
        peers = ordered_ranks.mesh_peers(order, LIMIT)
        found = [share_of(order, rank, *peers, length).tobytes() for length in LENGTHS]
        (folder / f"{index}.{rank}").write_bytes(b"".join(found))
    with pytest.raises(ValueError, match=f"= {2 * world} ranks, {world} processes run"):
        ordered_ranks.mesh_peers(Order(2, world, 1, "left_fold"), LIMIT)
    dist.barrier()
    dist.destroy_process_group()
