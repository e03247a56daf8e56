"""One caller at a time: Numba's portable threading layer ends the process when two start parallel kernels at once.

What pool.py's workers do is inside such a call, and starts none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_lock = threading.RLock()


def exclusive(function: Callable[P, R]) -> Callable[P, R]:
    """The function, waiting while another thread is inside any function so marked."""

    @functools.wraps(function)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        with _lock:
            return function(*args, **kwargs)

    return waiting
