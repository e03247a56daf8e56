"""Blocks run on every thread that Numba may use, products inside them on one; errors are seen."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numba
import numpy as np
import pytest
import torch

from kernels.cpu.pool import spread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    yield
    numba.set_num_threads(before)


def test_every_item_is_done_and_threads_are_shared() -> None:
    before, seen, done = torch.get_num_threads(), set(), np.zeros(40, np.int64)
    meet = threading.Barrier(numba.get_num_threads(), timeout=20)

    def work(index: int, wait: bool) -> None:
        if wait:
            meet.wait()
        seen.add((threading.get_ident(), torch.get_num_threads()))
        done[index] += 1

    threads = numba.get_num_threads()
    spread(work, [(index, index < threads) for index in range(40)])
    assert done.tolist() == [1] * 40
    assert len({thread for thread, _ in seen}) == threads
    assert {inside for _, inside in seen} == ({1} if threads > 1 else {before})
    assert torch.get_num_threads() == before
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_an_error_in_a_block_is_raised() -> None:
    def work(index: int) -> None:
        if index == 3:
            raise MemoryError("block 3")

    with pytest.raises(MemoryError, match="block 3"):
        spread(work, [(index,) for index in range(6)])


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_nothing_is_written_after_an_error_was_raised(error: type[BaseException]) -> None:
    """Blocks that ran on would add to sums that the caller may already use for something else."""
    begun, release, done = threading.Event(), threading.Event(), []

    def work(index: int) -> None:
        if index == 0:
            begun.wait(20)
            threading.Timer(0.1, release.set).start()
            raise error("block 0")
        begun.set()
        release.wait(20)
        done.append(index)

    if numba.get_num_threads() > 1:
        with pytest.raises(error, match="block 0"):
            spread(work, [(index,) for index in range(6)])
        after = list(done)
        spread(lambda index: None, [(index,) for index in range(6)])  # and the pool is as good as new
        assert done == after


def test_a_fork_has_a_pool_of_its_own() -> None:
    spread(lambda index: None, [(0,), (1,)])
    child = os.fork()
    if child == 0:
        done = []
        spread(lambda index: done.append(index), [(0,), (1,)])
        os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
