"""Blocks of work that need nothing of each other, one thread each: no thread waits for another before all is done.

Inside a worker a product runs on that thread alone and kernels are compiled without a loop over threads. It is how
attention, the linears and the head's weight gradient, made of many small products, use many cores. What a block writes
is its own, so no order shows in a bit; the flag alone is shared, and every writer writes 1.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any

import numba
import torch


def spread(work: Callable[..., None], items: Sequence[tuple[Any, ...]]) -> None:
    """Call work(*item) for every item, on as many threads as Numba may use. Raises what a call raised.

    Whatever is raised, an interruption too, no block still writes once the caller goes on.
    """
    threads = numba.get_num_threads()
    if threads == 1 or len(items) == 1:
        for item in items:
            work(*item)
        return
    futures: list[Future[None]] = []
    try:
        futures.extend(_workers(threads, os.getpid()).submit(work, *item) for item in items)
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()
        wait(futures)


@lru_cache(maxsize=1)
def _workers(threads: int, process: int) -> ThreadPoolExecutor:
    """The pool, of this process: a fork has none of its parent's threads."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "block", initializer=_alone)
    all_here = threading.Barrier(threads)  # else the pool would start some only later
    for future in [pool.submit(all_here.wait) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(before)  # a thread that starts later takes the number that was set last
    return pool


def _alone() -> None:
    """This thread's products run on it alone. torch would set a new thread's number at its first question, so ask."""
    torch.get_num_threads()
    torch.set_num_threads(1)
