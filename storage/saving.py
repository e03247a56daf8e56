"""Saving beside training: a checkpoint is written by a thread, and training waits for a copy of its state alone.

    save(k)    wait for the save before ─▶ copy the state ─┬─▶ training goes on
                                                           └─▶ thread: gather, hash, prove, write, manifest last

One save is in flight. The next one waits for it, and so do the end of a segment and every error, so that whoever sees a
segment's end sees its checkpoints. What goes wrong in the thread is raised where training next asks. A process that is
killed meanwhile leaves the checkpoint before, and the steps since then in the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from model.copying import Copier
from model.state import State


class Saver:
    """write: saves a state, or does a rank's part in that. beside: whether it does so in a thread, on a copy; else in
    place, and save() returns when it is done.

    As a context it waits for the last save; where an error ends it, that is the one that counts.
    """

    def __init__(self, write: Callable[[State], object], beside: bool) -> None:
        self._write = write
        self._copier = Copier() if beside else None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, state: State) -> None:
        """Save this state as it is now. Raises what went wrong in the save before."""
        self.wait()
        if self._copier is None:
            self._write(state)
            return
        # Not waited for at the process's end: who asks it twice to stop wants no whole checkpoint.
        self._thread = threading.Thread(target=self._save, args=(self._copier.copy(state),), name="save", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong in the save before, if that is known; waits for nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight; raises what went wrong in it, once."""
        if self._thread is None:
            return
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None:
            raise error

    def _save(self, copy: State) -> None:
        try:
            self._write(copy)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.wait()
            return
        with suppress(Exception):
            self.wait()
