"""With what a mix was made: code, Python, Unicode tables, libraries. Beside the mix, under no root, as an explanation.

    made-with.json    written by `prepare` before anything else

The same mix comes out with many versions. Where another came out, this says which of them could be the reason.
"""

import platform
import unicodedata

from storage.errors import InputFault, Refused
from storage.provenance import code_digest, version
from storage.records import Digest, Record, Text
from storage.store import Store

KEY = "made-with.json"
LIMIT = 1 << 20
# What cuts, orders, encodes or writes text.
DISTRIBUTIONS = ("blake3", "duckdb", "fastokens", "numpy", "pyarrow", "tokenizers")


class MadeWith(Record):
    """`unicode` is the version of Python's tables, by which equal texts are recognised; libraries have tables too."""

    code: Digest
    versions: dict[str, Text]


def here() -> MadeWith:
    """What this process would make a mix with."""
    versions = {"python": platform.python_version(), "unicode": unicodedata.unidata_version}
    return MadeWith(code=code_digest(), versions=versions | {name: version(name) for name in DISTRIBUTIONS})


def record(store: Store) -> None:
    """Say in the store of a mix that is not finished what it is made with.

    Where another version began it, all is made anew by this one, and what is there must be the same: so it is this
    one's mix, and what it does not share with another version's is to be explained by this one.
    """
    if _readable(store) != here():
        store.delete(KEY)
        store.create(KEY, here().canonical())


def recorded(store: Store, base: str = "") -> MadeWith | None:
    """What the mix was made with, if it says so."""
    if base + KEY not in store.list(base + KEY):
        return None
    return MadeWith.parse(store.read(base + KEY, limit=LIMIT), base + KEY)


def claim(store: Store) -> None:
    """For a mix that is to be made anew: Refused unless the store is empty, or was begun by this code and versions."""
    keys, found = store.list(), _readable(store)
    if keys and found != here():
        why = f"was made with {differences(found, here())}" if found else f"holds {len(keys)} objects of unknown origin"
        raise Refused(
            f"{store.uri} {why}; nothing was changed",
            cause="parts that another version made would be taken up here, not made anew",
            next_step=f"remove {store.uri.removeprefix('file://')}, or give another --folder",
        )
    record(store)


def _readable(store: Store) -> MadeWith | None:
    try:
        return recorded(store)
    except InputFault:
        return None


def differences(one: MadeWith, other: MadeWith) -> str:
    """In words: which versions differ, else whether the code does; "" if nothing does."""
    names = sorted(one.versions.keys() | other.versions.keys())
    pairs = [(name, one.versions.get(name, "absent"), other.versions.get(name, "absent")) for name in names]
    parts = [f"{name} {a} and {b}" for name, a, b in pairs if a != b]
    parts += [f"code {one.code[:16]} and {other.code[:16]}"] if one.code != other.code else []
    return ", ".join(parts)
