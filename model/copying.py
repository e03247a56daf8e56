"""A state's copy in host memory, so that training may go on while the copy is written.

The room is taken once and kept: memory that is fresh at every copy would be slower than the copy. For a GPU it is
page-locked, where the system allows that: the device writes to it several times as fast.
"""

import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from model.state import State


class Copier:
    """Room in host memory for one state, or for the rows that a rank owns. Each copy takes the place of the last."""

    def __init__(self) -> None:
        self._room: dict[str, torch.Tensor] = {}

    def copy(self, state: State) -> State:
        """The same state, every tensor an array f32 of its own on the host; whole when this returns."""
        for name, tensor in state.tensors().items():
            source = _tensor(tensor)
            if name not in self._room:
                self._room[name] = self._new_room(source)
            self._room[name].copy_(source)
        tensors = {name: room.numpy() for name, room in self._room.items()}
        return State.of(tensors, state.scalars())

    def _new_room(self, source: torch.Tensor) -> torch.Tensor:
        """PyTorch's own page-locked memory comes in powers of two, so plain memory is locked: as long as this lives."""
        room = torch.empty(source.shape, dtype=source.dtype)
        if source.is_cuda and room.nbytes:
            runtime, place = torch.cuda.cudart(), room.data_ptr()
            if int(runtime.cudaHostRegister(place, room.nbytes, 0)) == 0:
                weakref.finalize(self, runtime.cudaHostUnregister, place).atexit = False
            else:
                with suppress(RuntimeError):  # CUDA tells it again at the next launch, which must not be the step's
                    torch.ones(1, device=source.device)
        return room


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array
