"""Many ranks in one process: a thread each, which move arrays through mailboxes instead of sockets."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np

from model.ordered import Order
from model.ordered_ranks import Peers

PATIENCE = 20  # seconds until a rank that waits for nobody fails
T = TypeVar("T")


@dataclass
class Post:
    """One box for each (sender, receiver), in ranks of the world."""

    boxes: dict[tuple[int, int], queue.SimpleQueue[np.ndarray]] = field(default_factory=dict)

    def box(self, sender: int, receiver: int) -> queue.SimpleQueue[np.ndarray]:
        return self.boxes.setdefault((sender, receiver), queue.SimpleQueue())


@dataclass
class Mailboxes:
    """`Peers` over a Post: rank r of the group is rank members[r] of the world."""

    post: Post
    members: list[int]
    rank: int
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.members)

    def send(self, peer: int, array: np.ndarray) -> None:
        self.post.box(self.members[self.rank], self.members[peer]).put(array.copy())

    def receive(self, peer: int, length: int) -> np.ndarray:
        array = self.post.box(self.members[peer], self.members[self.rank]).get(timeout=PATIENCE)
        assert array.shape == (length,)
        return array

    def swap(self, peer: int, array: np.ndarray) -> np.ndarray:
        self.send(peer, array)
        return self.receive(peer, len(array))

    def all_to_all(self, flat: np.ndarray, counts: list[int]) -> np.ndarray:
        ends = list(accumulate(counts))
        for peer, (end, count) in enumerate(zip(ends, counts, strict=True)):
            self.send(peer, flat[end - count : end])
        return np.stack([self.receive(peer, counts[self.rank]) for peer in range(self.size)])

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        if self.rank > 0:
            return self.receive(0, len(array))
        for peer in range(1, self.size):
            self.send(peer, array)
        return array


def on_all_ranks(order: Order, task: Callable[[int, Peers, Peers], T]) -> list[T]:
    """The results of task(rank, node, across) on every rank of the order, all at once."""
    post = Post()

    def run(rank: int) -> T:
        replica, shard = divmod(rank, order.shards)
        node = [order.rank(replica, s) for s in range(order.shards)]
        across = [order.rank(r, shard) for r in range(order.replicas)]
        return task(rank, Mailboxes(post, node, shard), Mailboxes(post, across, replica))

    with ThreadPoolExecutor(order.world) as pool:
        return list(pool.map(run, range(order.world)))
