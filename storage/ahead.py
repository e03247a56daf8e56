"""Work that threads do ahead of whoever takes its results: in order, a bounded number at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


def ahead(pool: Executor, work: Callable[..., T], arguments: Iterable[Any], most: int) -> Iterator[T]:
    """`work(*each)` for each of the arguments in order, begun when at most `most` results are not taken yet.

    The first failure in that order is raised; none is begun after it, and none still runs when this ends.
    """
    begun: deque[Future[T]] = deque()
    try:
        for each in arguments:
            begun.append(pool.submit(work, *each))
            if len(begun) == most:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()
        wait(begun)
