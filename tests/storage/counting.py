"""A store that counts what is read of another one."""

from collections import Counter

from storage.objects import MAX_OBJECT, Data, Keys
from storage.store import Store


class Counting:
    """Passes every call on; whole: bytes by key of whole reads; ranges: bytes by key of ranged ones."""

    def __init__(self, store: Store) -> None:
        self._store, self.uri = store, store.uri
        self.whole: Counter[str] = Counter()
        self.ranges: Counter[str] = Counter()

    def create(self, key: str, data: Data) -> bool:
        return self._store.create(key, data)

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        data = self._store.read(key, digest, limit)
        self.whole[key] += len(data)
        return data

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges[key] += length
        return self._store.read_range(key, start, length)

    def list(self, prefix: str = "") -> Keys:
        return self._store.list(prefix)

    def size(self, key: str) -> int:
        return self._store.size(key)

    def delete(self, key: str) -> None:
        self._store.delete(key)
