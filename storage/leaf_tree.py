"""The tree inside a shard's digest: by it a few of its leaves can be verified without the others.

A shard's digest is BLAKE3 of its leaves, and BLAKE3 is a tree: chunks of 1,024 bytes (32 leaves) at its foot, and above
them pairs, the last of an odd number going up alone. The *path* of a chunk is what stands beside its way to the top:

    chunk's bytes, path ──▶ the shard's digest, or the chunk is not this shard's

`blake3` gives only the digest of a whole, so the function is written out here once more, in NumPy and over many chunks
at a time, after section 2 of the paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn: "BLAKE3: one function, fast
everywhere"). A test holds it to `kernels.digest`.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

CHUNK = 1024  # bytes
_BLOCK, _NODE = 64, 32  # bytes
_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
_ORDER = np.array([2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8])
_FIRST, _LAST, _PARENT, _ROOT, _CONTEXT, _MATERIAL = 1, 2, 4, 8, 32, 64  # flags


def chunks_of(size: int) -> int:
    """How many chunks `size` > 0 bytes have."""
    return -(-size // CHUNK)


def path_size(chunks: int) -> int:
    """Bytes of the path of each of so many chunks: one node a level, zeros where a chunk goes up alone."""
    return _NODE * (chunks - 1).bit_length()


def paths(data: bytes, purpose: str) -> bytes:
    """The paths of all chunks of `data` in order, path_size() bytes each."""
    count = chunks_of(len(data))
    cut = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    row = _chunks(cut, np.arange(count), purpose, np.full(count, count == 1))
    beside = np.zeros((count, path_size(count) // 4), np.uint32)
    place = np.arange(count)
    for level in range(beside.shape[1] // 8):
        has = place ^ 1 < len(row)
        beside[has, level * 8 : level * 8 + 8] = row[(place ^ 1)[has]]
        pairs = len(row) // 2
        joined = _join(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], purpose, np.full(pairs, len(row) == 2))
        row, place = np.concatenate([joined, row[2 * pairs :]]), place // 2
    return beside.astype("<u4").tobytes()


def roots(
    chunks: Sequence[bytes], places: np.ndarray, counts: np.ndarray, ways: Sequence[bytes], purpose: str
) -> list[str]:
    """For each chunk, as number places[i] of counts[i] chunks (int64[n]) and with its path ways[i]: the digest that it
    leads to, as 64 hex digits."""
    node = _chunks(chunks, places, purpose, counts == 1)
    width = max(map(len, ways))
    beside = np.frombuffer(b"".join(way.ljust(width, b"\0") for way in ways), "<u4").reshape(len(ways), -1)
    place, size = places.copy(), counts.copy()
    for level in range(beside.shape[1] // 8):
        other = beside[:, level * 8 : level * 8 + 8]
        here = (place ^ 1 < size) & (size > 1)
        odd = (place % 2 == 1)[:, None]
        left, right = np.where(odd, other, node)[here], np.where(odd, node, other)[here]
        node[here] = _join(left, right, purpose, size[here] == 2)
        place, size = place // 2, (size + 1) // 2
    return [row.astype("<u4").tobytes().hex() for row in node]


@lru_cache(maxsize=8)
def _key(purpose: str) -> bytes:
    """What stands for the purpose in every node: the digest of its name, which is as kernels.digest has it."""
    name = f"verbatim 2026 {purpose}".encode()
    assert len(name) <= _BLOCK
    words = np.frombuffer(name.ljust(_BLOCK, b"\0"), "<u4").astype(np.uint32)[None]
    flags = np.array([_FIRST | _LAST | _ROOT | _CONTEXT], np.uint32)
    return _compress(_IV[None], words, np.zeros(1, np.int64), np.array([len(name)]), flags).tobytes()


def _keys(purpose: str, count: int) -> np.ndarray:
    return np.tile(np.frombuffer(_key(purpose), np.uint32), (count, 1))


def _chunks(chunks: Sequence[bytes], places: np.ndarray, purpose: str, root: np.ndarray) -> np.ndarray:
    """uint32[n, 8]: the node of each chunk, which is number places[i] of its whole; root: it is all of it."""
    count = len(chunks)
    padded = b"".join(chunk.ljust(CHUNK, b"\0") for chunk in chunks)
    words = np.frombuffer(padded, "<u4").astype(np.uint32).reshape(count, -1, 16)
    sizes = np.array([len(chunk) for chunk in chunks])
    node = _keys(purpose, count)
    for block in range(CHUNK // _BLOCK):
        inside = np.clip(sizes - block * _BLOCK, 0, _BLOCK)
        here = inside > 0
        last = sizes <= (block + 1) * _BLOCK
        flags = _MATERIAL | (_FIRST if block == 0 else 0) | np.where(last, _LAST | np.where(root, _ROOT, 0), 0)
        node[here] = _compress(node[here], words[here, block], places[here], inside[here], flags[here])
    return node


def _join(left: np.ndarray, right: np.ndarray, purpose: str, root: np.ndarray) -> np.ndarray:
    """uint32[n, 8]: the nodes above these pairs."""
    count = len(left)
    flags = _MATERIAL | _PARENT | np.where(root, _ROOT, 0)
    words = np.concatenate([left, right], axis=1)
    return _compress(_keys(purpose, count), words, np.zeros(count, np.int64), np.full(count, _BLOCK), flags)


def _compress(
    node: np.ndarray, words: np.ndarray, counter: np.ndarray, length: np.ndarray, flags: np.ndarray
) -> np.ndarray:
    """uint32[n, 8] of uint32[n, 8], a block uint32[n, 16] and three integers each: BLAKE3's compression function."""
    block = words.T
    last = np.stack([counter & 0xFFFFFFFF, counter >> 32, length, flags]).astype(np.uint32)
    rows = [node.T[:4], node.T[4:], np.repeat(_IV[:4, None], len(node), axis=1), last]
    for _ in range(7):
        rows = _quarters(rows, block[0:8:2], block[1:8:2])
        rows = [np.roll(row, -i, axis=0) for i, row in enumerate(rows)]
        rows = _quarters(rows, block[8::2], block[9::2])
        rows = [np.roll(row, i, axis=0) for i, row in enumerate(rows)]
        block = block[_ORDER]
    return np.ascontiguousarray(np.concatenate([rows[0] ^ rows[2], rows[1] ^ rows[3]]).T)


def _quarters(rows: list[np.ndarray], first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
    """The paper's G on each of the four columns of the state, uint32[4, n] a row, with two words of the block each."""
    a, b, c, d = rows
    for word, right_d, right_b in ((first, 16, 12), (second, 8, 7)):
        a = a + b + word
        d = _turned(d ^ a, right_d)
        c = c + d
        b = _turned(b ^ c, right_b)
    return [a, b, c, d]


def _turned(words: np.ndarray, right: int) -> np.ndarray:
    return (words >> np.uint32(right)) | (words << np.uint32(32 - right))
