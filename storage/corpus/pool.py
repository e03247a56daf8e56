"""Jobs of a preparation, and how they are carried out: in this process, or by several of this machine.

A job leaves its result in the preparation's pieces or in the store, so that it may run anywhere that reaches those, in
any order and more than once.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

from storage.errors import VerbatimError
from storage.processes import cores

LOOK = 10.0  # seconds without a result after which it is looked whether anybody is still at work


class Job(Protocol):
    """size: about how many bytes it goes through; finished: whether its result is there, whole."""

    @property
    def size(self) -> int: ...

    def finished(self) -> bool: ...

    def __call__(self) -> None: ...


Done = Callable[[Any], None]  # told of each job that is done
Run = Callable[[str, Sequence[Any], Done], None]  # carries out the jobs of a stage; (its name, jobs, done)


def serially(stage: str, jobs: Sequence[Job], done: Done) -> None:
    """One after another, in this process."""
    for job in jobs:
        job()
        done(job)


@contextmanager
def processes(workers: int) -> Iterator[Run]:
    """By `workers` processes, the largest jobs first; a single job in this process, with all threads.

    Raises a job's error at once; those that have begun are ended. A lost process is a VerbatimError.
    """
    if workers == 1:
        yield serially
        return
    threads = max(1, cores() // workers)
    executor = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (threads,))
    try:
        yield lambda stage, jobs, done: _together(executor, stage, jobs, done)
    finally:
        running = list((executor._processes or {}).values())  # no public way to them before Python 3.14
        executor.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()


def _together(executor: ProcessPoolExecutor, stage: str, jobs: Sequence[Job], done: Done) -> None:
    if len(jobs) < 2:
        return serially(stage, jobs, done)
    try:
        futures = {executor.submit(job): job for job in sorted(jobs, key=lambda job: -job.size)}
        left = set(futures)
        while left:
            ended, left = wait(left, LOOK, FIRST_COMPLETED)
            for future in ended:
                future.result()
                done(futures[future])
            if not ended and not any(process.is_alive() for process in (executor._processes or {}).values()):
                raise _lost()  # and nobody told the executor
    except BrokenProcessPool:
        raise _lost() from None


def _lost() -> VerbatimError:
    return VerbatimError(
        "a process that prepares the mix was ended by someone else",
        cause="the system ran out of memory, or someone killed it",
        next_step="run the same command again: it goes on from there. If memory was short, lower plan.workers or "
        "plan.sort_mb in the recipe",
    )


def _begin(threads: int) -> None:
    """A worker's first act: it shares the cores with the others, and ends when whoever started it is gone."""
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.join,), daemon=True).start()


def _end_with(gone: Callable[[], None]) -> None:
    gone()
    os._exit(1)
