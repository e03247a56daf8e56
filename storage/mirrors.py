"""Several copies of one release, read as one store: what is bad in one is reported and taken from another.

    open_copies([address, …])      one folder alone as it is; otherwise Mirrors, with the cache for remote copies
    bad_copies(store)              what was found to be bad, and where
    Beside(store, prefix)          what lies below a prefix of each copy, and in no list

RELEASE.json, signed by the run's trainer, lists every object with its digest and size. So each whole read is verified
whoever asks, no store is asked what there is, and a store that hides, cuts or exchanges an object is found out. A piece
of an object is verified by whoever reads it, through `sound`. What is used is the same whichever store it came from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TypeVar

from storage.cache import Cache
from storage.claims import FAULTS, Claim, agreed, none_sound
from storage.errors import InputFault, MissingObject, StorageError, UsageError, VerbatimError
from storage.ledger import HEADER_KEY
from storage.objects import MAX_OBJECT, Data, Keys, check_limit, check_range, missing, object_digest
from storage.release import RELEASE_KEY, Object
from storage.store import LocalStore, Store, open_store, sound

T = TypeVar("T")


@dataclass(frozen=True)
class BadCopy:
    """An object that could not be used in one store; wrong: in words."""

    store: str
    key: str
    wrong: str

    def document(self) -> dict[str, str]:
        """Plain values for JSON."""
        return asdict(self)


def open_copies(addresses: Sequence[str], cached: bool = True) -> Store:
    """The release at these addresses, the preferred first. Nothing is read yet.

    cached: keep what comes from remote stores on this machine, and use what was kept.
    """
    stores = list({store.uri: store for store in map(open_store, addresses)}.values())
    if len(stores) == 1 and isinstance(stores[0], LocalStore):
        return stores[0]
    return Mirrors(stores, Cache.of_user() if cached else None)


def stores_of(store: Store) -> list[Store]:
    """The single stores that open_copies() joined."""
    return store.stores if isinstance(store, Mirrors) else [store]


def bad_copies(store: Store) -> tuple[BadCopy, ...]:
    """What was found so far to be bad in one of several stores."""
    return tuple(store.bad.values()) if isinstance(store, Mirrors) else ()


def present(store: Store) -> Iterator[tuple[str, str]]:
    """(address, key) of all that really lies in each of the single stores, whatever a release lists."""
    if isinstance(store, Mirrors):
        yield from store.present()
    else:
        yield from ((store.uri, key) for key in store.list())


class Mirrors:
    """A release of which the stores hold copies. It can only be read; see agreed() for what the first read raises.

    bad: the copies that were found to be bad, by store and key.
    """

    def __init__(self, stores: Sequence[Store], cache: Cache | None = None) -> None:
        self.stores, self._cache = list(stores), cache
        self.uri = " or ".join(store.uri for store in stores)
        self.bad: dict[tuple[str, str], BadCopy] = {}
        self._silent: set[str] = set()  # stores that could not be asked: they are asked last

    @cached_property
    def _claim(self) -> Claim:
        return agreed(self.stores, self.tell)

    @property
    def _objects(self) -> dict[str, Object]:
        return self._claim.release.body.objects

    def sound(self, key: str, fetch: Callable[[Store], T]) -> T:
        """`fetch` of the first copy in which it finds nothing wrong; of none, the error that names each of them."""
        failures: list[VerbatimError] = []
        objects = self._objects
        for store in sorted(self.stores, key=lambda store: store.uri in self._silent):
            copy = _Copy(store, objects, None if isinstance(store, LocalStore) else self._cache)
            try:
                return copy.sound(fetch)
            except FAULTS as error:
                self.tell(store, getattr(error, "key", "") or key, error)
                failures.append(error)
        raise none_sound(key, failures)

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        if key in (HEADER_KEY, RELEASE_KEY):  # read and proven already
            proven = (self._claim.header if key == HEADER_KEY else self._claim.release).canonical()
            check_limit(self.uri, key, len(proven), limit)
            return proven
        entry = self._listed(key)
        check_limit(self.uri, key, entry.size, limit)
        if digest not in (None, entry.digest):
            raise InputFault(
                f"{self.uri}: {RELEASE_KEY} lists {key} with digest {entry.digest}, expected {digest}",
                cause="its publisher listed another object than the run needs",
                next_step="do not rely on this release; ask its publisher",
            )
        return self.sound(key, lambda copy: copy.read(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        self._listed(key)
        return self.sound(key, lambda copy: copy.read_range(key, start, length))

    def list(self, prefix: str = "") -> Keys:
        return sorted(key for key in (*self._objects, RELEASE_KEY) if key.startswith(prefix))

    def size(self, key: str) -> int:
        return len(self._claim.release.canonical()) if key == RELEASE_KEY else self._listed(key).size

    def present(self) -> Iterator[tuple[str, str]]:
        """(address, key) of all that lies in each store. One that cannot be asked is reported, unless it is the only
        one: then StorageError."""
        for store in self.stores:
            try:
                keys = store.list()
            except StorageError as error:
                if len(self.stores) == 1:
                    raise
                self.tell(store, RELEASE_KEY, error)
                continue
            yield from ((store.uri, key) for key in keys)

    def create(self, key: str, data: Data) -> bool:
        raise _read_only(self.uri)

    def delete(self, key: str) -> None:
        raise _read_only(self.uri)

    def _listed(self, key: str) -> Object:
        if key not in self._objects:
            raise missing(self.uri, key)
        return self._objects[key]

    def tell(self, store: Store, key: str, error: VerbatimError) -> None:
        """Report a bad copy; of one key in one store the first report stands."""
        if isinstance(error, StorageError):
            self._silent.add(store.uri)
        self.bad.setdefault((store.uri, key), BadCopy(store.uri, key, error.message))


class Beside:
    """What lies below a prefix of each copy of a release, and in no list: found by listing, proven by who reads it.

    Reading it is like reading the release: what is bad beside one copy is reported with the release's bad copies, and
    taken from beside another. A copy need not have any of it.
    """

    def __init__(self, release: Store, prefix: str) -> None:
        self.stores = [open_store(f"{copy.uri.rstrip('/')}/{prefix}") for copy in stores_of(release)]
        self.uri = " or ".join(store.uri for store in self.stores)
        self._release = release

    def sound(self, key: str, fetch: Callable[[Store], T]) -> T:
        """`fetch` of the first store that has `key` and in which it finds nothing wrong; else the error that names each
        of them."""
        failures: list[VerbatimError] = []
        for store in self.stores:
            try:
                if key in store.list(key):
                    return sound(store, key, fetch)
            except FAULTS as error:
                if isinstance(self._release, Mirrors):
                    self._release.tell(store, getattr(error, "key", "") or key, error)
                failures.append(error)
        raise none_sound(key, failures) if failures else missing(self.uri, key)

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        return self.sound(key, lambda store: store.read(key, digest, limit))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self.sound(key, lambda store: store.read_range(key, start, length))

    def list(self, prefix: str = "") -> Keys:
        """What the stores hold together; StorageError where they hold none, and one could not be asked."""
        found, failures = set[str](), list[StorageError]()
        for store in self.stores:
            try:
                found.update(store.list(prefix))
            except StorageError as error:
                failures.append(error)
        if failures and not found:
            raise failures[0]
        return sorted(found)

    def size(self, key: str) -> int:
        return self.sound(key, lambda store: store.size(key))

    def create(self, key: str, data: Data) -> bool:
        raise _read_only(self.uri)

    def delete(self, key: str) -> None:
        raise _read_only(self.uri)


class _Copy:
    """One copy as one fetch sees it: digests and sizes are the release's, what was kept here need not come again."""

    def __init__(self, store: Store, objects: dict[str, Object], cache: Cache | None) -> None:
        self._store, self._objects, self._cache = store, objects, cache
        self.uri = store.uri
        self._came: dict[str, bytes] = {}
        self._used: set[str] = set()

    def sound(self, fetch: Callable[[Store], T]) -> T:
        """`fetch`, of a remote copy once more if it finds a fault: what was kept here may be damaged, or the way was
        at fault. What is sound is kept."""
        try:
            result = fetch(self)
        except InputFault as error:
            if isinstance(self._store, LocalStore) or isinstance(error, MissingObject):
                raise
            self._forget()
            return fetch(self)
        if self._cache is not None:
            for name, data in self._came.items():
                self._cache.put(name, data)
        return result

    def read(self, key: str, digest: str | None = None, limit: int = MAX_OBJECT) -> bytes:
        entry = self._objects[key]
        kept = self._kept(entry.digest, entry.size)
        if kept is not None and object_digest(kept) == entry.digest:
            return kept
        if kept is not None and self._cache is not None:
            self._cache.drop(entry.digest)
        return self._fetched(entry.digest, self._store.read(key, entry.digest, entry.size))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        entry = self._objects[key]
        check_range(self.uri, key, entry.size, start, length)
        name = f"{entry.digest}-{start}-{length}"
        kept = self._kept(name, length)
        return self._fetched(name, self._store.read_range(key, start, length)) if kept is None else kept

    def list(self, prefix: str = "") -> Keys:
        return sorted(key for key in self._objects if key.startswith(prefix))

    def size(self, key: str) -> int:
        return self._objects[key].size

    def create(self, key: str, data: Data) -> bool:
        raise _read_only(self.uri)

    def delete(self, key: str) -> None:
        raise _read_only(self.uri)

    def _kept(self, name: str, size: int) -> bytes | None:
        data = self._cache.get(name, size) if self._cache is not None else None
        if data is not None:
            self._used.add(name)
        return data

    def _fetched(self, name: str, data: bytes) -> bytes:
        if self._cache is not None:
            self._came[name] = data
        return data

    def _forget(self) -> None:
        """Drop what was used of the cache, and do without it from now on."""
        if self._cache is not None:
            for name in self._used:
                self._cache.drop(name)
        self._cache = None


def _read_only(uri: str) -> UsageError:
    return UsageError(f"{uri}: published copies can only be read")
