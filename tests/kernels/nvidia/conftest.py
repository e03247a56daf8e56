"""These tests run in Triton's interpreter; where there is no Triton, as on arm64 or macOS, there are none of them."""

import importlib.util
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports kernels.nvidia

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which NumPy 2.4 no longer takes as a loop's bounds."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_lang_tensor
