import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports kernels.nvidia

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes as a loop's bounds."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_lang_tensor
