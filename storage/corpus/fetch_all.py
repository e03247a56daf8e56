"""Stage "fetch": what is not of this machine comes into the cache, several files at a time, by one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from storage.corpus.fetch import fetch, is_here
from storage.corpus.spec import PinnedFile

AT_ONCE = 4  # files
LOOK = 1.0  # seconds between two looks at how far they are


class _Stopped(Exception):
    """Another file's error ends all downloads; their parts are kept."""


@dataclass(frozen=True)
class FetchAll:
    """Download these files, unless they are in the cache. tell(bytes that are there) is called now and then."""

    pins: tuple[PinnedFile, ...]
    cache: Path
    tell: Callable[[int], None]

    @property
    def size(self) -> int:
        return sum(pin.size for pin in self.pins)

    def finished(self) -> bool:
        return all(is_here(pin, self.cache) for pin in self.pins)

    def __call__(self) -> None:
        """Raises what `fetch` does, at the first file that cannot be had."""
        come = [pin.size if is_here(pin, self.cache) else 0 for pin in self.pins]
        stopped: list[bool] = []

        def told(number: int, done: int, total: int) -> None:
            if stopped:
                raise _Stopped
            come[number] = min(done, self.pins[number].size)

        with ThreadPoolExecutor(AT_ONCE, "fetch") as threads:
            begun = {
                threads.submit(fetch, pin, self.cache, partial(told, number)) for number, pin in enumerate(self.pins)
            }
            try:
                while begun:
                    ended, begun = wait(begun, LOOK, FIRST_EXCEPTION)
                    for one in ended:
                        one.result()
                    self.tell(sum(come))
            except BaseException:
                stopped.append(True)
                threads.shutdown(wait=False, cancel_futures=True)
                raise
