"""Objects that nobody stored: each put together, when it is read, from bytes at hand and ranges of other objects.

So a file of many gigabytes that only orders anew what lies in a store takes neither memory nor disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from storage.errors import UsageError
from storage.objects import MAX_OBJECT, Data, Keys, check_limit, check_range, missing, verified
from storage.store import Store, object_digest


@dataclass(frozen=True)
class Span:
    """`length` bytes of the object `key` in `store`, from `start` on."""

    store: Store
    key: str
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def take(self, start: int, stop: int) -> bytes:
        """Bytes start to stop of the span."""
        return self.store.read_range(self.key, self.start + start, stop - start)


@dataclass(frozen=True)
class Assembly:
    """An object: its pieces in order, and the digest that they must have."""

    pieces: tuple[bytes | Span, ...]
    digest: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """An object of bytes at hand."""
        return cls((data,), object_digest(data))

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(piece) for piece in self.pieces)


class Assembled:
    """A store that can only be read. Its objects are given by key."""

    def __init__(self, uri: str, objects: Mapping[str, Assembly]) -> None:
        self.uri, self._objects = uri, dict(objects)

    @property
    def digests(self) -> dict[str, str]:
        """The digest that each object must have, by key."""
        return {key: assembly.digest for key, assembly in self._objects.items()}

    def create(self, key: str, data: Data) -> bool:
        raise UsageError(f"{self.uri} can only be read")

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        size = self.size(key)
        check_limit(self.uri, key, size, limit)
        return verified(self.uri, key, self.read_range(key, 0, size), digest)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(self.uri, key, self.size(key), start, length)
        found, before, stop = [], 0, start + length
        for piece in self._objects[key].pieces:
            first, last = max(start - before, 0), min(stop - before, len(piece))
            if first < last:
                found.append(piece.take(first, last) if isinstance(piece, Span) else piece[first:last])
            before += len(piece)
        return b"".join(found)

    def list(self, prefix: str = "") -> Keys:
        return sorted(key for key in self._objects if key.startswith(prefix))

    def size(self, key: str) -> int:
        if key not in self._objects:
            raise missing(self.uri, key)
        return self._objects[key].size

    def delete(self, key: str) -> None:
        raise UsageError(f"{self.uri} can only be read")
