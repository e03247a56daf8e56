"""Reading files that a person names.

A shell pattern or a recipe can also name a pipe, a device or an endless file; reading it would wait for ever or fill
the memory.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: Path) -> BinaryIO:
    """The file, opened for reading; OSError unless it is a regular one. Links are followed: the caller named it."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not be waited for
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """All bytes of the file; OSError, with a sentence as its strerror, if there are more than `limit`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it holds {size} bytes, at most {limit} are allowed", str(path))
        return file.read(limit)
