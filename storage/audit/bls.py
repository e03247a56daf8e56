"""BLS signatures on the curve BLS12-381, as drand's quicknet makes them: a signature in G1, the group's key in G2.

By py_ecc, whose import takes a second, so this file is imported where a signature is checked. py_ecc also raises the
interpreter's limit of recursion a hundredfold, with which hostile JSON could overflow the stack: it is put back here.
"""

import hashlib
import sys
from typing import Any

_LIMIT = sys.getrecursionlimit()

from py_ecc.bls.g2_primitives import subgroup_check  # noqa: E402
from py_ecc.bls.hash_to_curve import hash_to_G1  # noqa: E402
from py_ecc.bls.point_compression import decompress_G1, decompress_G2  # noqa: E402
from py_ecc.bls.typing import G1Compressed, G2Compressed  # noqa: E402
from py_ecc.optimized_bls12_381 import (  # noqa: E402
    FQ12,
    G2,
    Z1,
    add,
    final_exponentiate,
    is_inf,
    multiply,
    neg,
    pairing,
)

sys.setrecursionlimit(_LIMIT)

DOMAIN = b"BLS_SIG_BLS12381G1_XMD:SHA-256_SSWU_RO_NUL_"


def point(signature: str) -> Any:
    """The point of G1 that 96 hex digits are; None if they are none, or none of the right subgroup."""
    try:
        found = decompress_G1(G1Compressed(int(signature, 16)))
    except ValueError:
        return None
    return None if is_inf(found) or not subgroup_check(found) else found


def hashed(message: bytes) -> Any:
    """The point of G1 that is signed for a message."""
    return hash_to_G1(message, DOMAIN, hashlib.sha256)  # type: ignore[arg-type]


def weighted(points: list[Any], factors: list[int]) -> Any:
    """The sum of the points of G1, each times its factor."""
    total = Z1
    for one, factor in zip(points, factors, strict=True):
        total = add(total, multiply(one, factor))
    return total


def balanced(signed: Any, signature: Any, key: str) -> bool:
    """Whether e(signed, key) = e(signature, generator); key: a compressed point of G2, 192 hex digits."""
    public = decompress_G2(G2Compressed((int(key[:96], 16), int(key[96:], 16))))
    both = pairing(public, signed, False) * pairing(G2, neg(signature), False)
    return bool(final_exponentiate(both) == FQ12.one())
