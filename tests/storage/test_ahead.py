"""Work done ahead: in order, no more at a time than asked for, none left running."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.ahead import ahead


class Work:
    """Doubles numbers; counts those that are begun and not taken."""

    def __init__(self) -> None:
        self.begun = self.running = 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> int:
        with self._lock:
            self.begun, self.running = self.begun + 1, self.running + 1
        time.sleep(0.002 * (7 - number % 7))  # later ones are often done first
        with self._lock:
            self.running -= 1
        if number == 30:
            raise ValueError(number)
        return 2 * number


def test_in_order_and_bounded() -> None:
    work, taken = Work(), 0
    with ThreadPoolExecutor(8) as pool:
        for number, result in enumerate(ahead(pool, work, ((number,) for number in range(30)), 4)):
            assert result == 2 * number
            assert work.begun <= taken + 4
            taken += 1
    assert taken == 30


def test_a_failure_ends_it() -> None:
    work, results = Work(), list[int]()
    with ThreadPoolExecutor(8) as pool:
        with pytest.raises(ValueError, match="30"):
            for result in ahead(pool, work, ((number,) for number in range(100)), 4):
                results.append(result)
        assert work.running == 0 and work.begun <= 30 + 4
    assert results == [2 * number for number in range(30)]


def test_whoever_stops_taking_waits_for_what_runs() -> None:
    work = Work()
    with ThreadPoolExecutor(8) as pool:
        results = ahead(pool, work, ((number,) for number in range(20)), 4)
        assert next(results) == 0
        results.close()  # type: ignore[attr-defined]
        assert work.running == 0 and work.begun <= 4
