"""Canonical JSON: one byte string for one value, so that its digest means the value.

Keys sorted by code points, no spaces, ASCII with the escapes of Python's json, and only strings, integers, booleans,
null, lists and objects. A float has no canonical decimal form, so it travels as its bits: eight hex digits of the
big-endian float32.
"""

import json
from typing import Any

import numpy as np

MAX_INTEGER = 2**63  # what every reader, in any language, can hold


class NotCanonical(ValueError):
    """The bytes or the value have no canonical form; the message says where and why."""


def dumps(value: Any) -> bytes:
    """The canonical bytes of `value`; raises NotCanonical for a float, a foreign type or an integer beyond 64 bits."""
    _check(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def loads(data: bytes) -> Any:
    """The value of canonical bytes; raises NotCanonical unless `data` is exactly what dumps() would write."""
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float)
        again = dumps(value)
    except NotCanonical:
        raise
    except (ValueError, RecursionError) as error:
        raise NotCanonical(f"not JSON: {error}") from None
    if again != data:
        raise NotCanonical("JSON that is not canonical: keys out of order, spaces, escapes or another encoding")
    return value


def bits(value: np.float32) -> str:
    """The float32 as eight hex digits of its big-endian bits."""
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def from_bits(text: str) -> np.float32:
    """The float32 that bits() wrote; raises NotCanonical for anything but eight lower-case hex digits."""
    if not isinstance(text, str) or len(text) != 8 or set(text) - set("0123456789abcdef"):
        raise NotCanonical(f"a float32 is eight lower-case hex digits, not {text!r}")
    return np.uint32(int(text, 16)).view(np.float32)


def _check(value: Any, where: str) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    if isinstance(value, int):
        if not -MAX_INTEGER <= value < MAX_INTEGER:
            raise NotCanonical(f"{where}: integer {value} does not fit 64 bits")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NotCanonical(f"{where}: key {key!r} is not a string")
            _check(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    else:
        raise NotCanonical(f"{where}: {type(value).__name__} has no canonical form (a float is written as its bits)")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise NotCanonical(f"duplicate key {name!r}")
            seen.add(name)
    return result


def _no_float(text: str) -> Any:
    raise NotCanonical(f"float {text} in canonical JSON (a float is written as its bits)")
