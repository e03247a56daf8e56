"""Loaded by every Python process of a variant: folders list in a drawn order, and the locale that is asked for holds.

Python itself takes no more than the characters' encoding from the environment; here the rest of the locale holds, too,
as in a program in which some library asked for it.
"""

import locale
import os
import random
from collections.abc import Iterator
from types import TracebackType
from typing import Any

SHUFFLE = "CORPUS_SHUFFLE"  # the seed
_draw = random.Random(os.environ.get(SHUFFLE))
_listdir, _scandir = os.listdir, os.scandir


class _Entries:
    """What os.scandir gives: an iterator that is closed."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


def shuffled_names(*where: Any) -> list[Any]:
    """os.listdir, in a drawn order."""
    names = _listdir(*where)
    _draw.shuffle(names)
    return names


def shuffled_entries(*where: Any) -> _Entries:
    """os.scandir, in a drawn order; glob and pathlib ask it as well."""
    with _scandir(*where) as found:
        entries = list(found)
    _draw.shuffle(entries)
    return _Entries(entries)


locale.setlocale(locale.LC_ALL, "")
if SHUFFLE in os.environ:
    os.listdir, os.scandir = shuffled_names, shuffled_entries  # type: ignore[assignment]
