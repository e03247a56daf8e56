"""What the launcher promises beside running a kernel."""

from typing import Any

import pytest
from triton.runtime.errors import OutOfResources

from kernels.nvidia import numbers


class Greedy:
    """A kernel that takes more than any device has."""

    __name__ = "greedy"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **constants: Any) -> None:
            raise OutOfResources(300_000, 232_448, "shared memory")

        return run


def test_a_device_that_lacks_what_a_kernel_takes_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match=r"greedy does not run on this device.*300000"):
        numbers.launch(Greedy(), (1,))
    numbers.launch(Greedy(), (0,))  # nothing to do, so nothing runs
