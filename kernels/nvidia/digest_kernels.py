"""BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn: "BLAKE3, one function, fast everywhere", sections 2.1 to 2.5) of
the leaves of many tensors, in two kernels.

`chunk_kernel`: one chunk of 1,024 bytes a lane, its sixteen compressions in turn, state and message wholly in
registers. `merge_kernel`: the tree above the chunks of each leaf, level by level, in a scratch buffer; a node without a
neighbour rises as it is, which gives BLAKE3's tree. A compression is 56 quarter rounds of 4 xors,
4 rotations and 6 additions, 12 operations a byte: the integer units are the limit, not memory. Xors and rotations have
one pipe only, so additions go to the other, where multiplications are: hence `one`, a 1 that the compiler doesn't know.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK_WORDS, BLOCK_WORDS = tl.constexpr(256), tl.constexpr(16)
START, END, PARENT, ROOT, MATERIAL = (tl.constexpr(flag) for flag in (1, 2, 4, 8, 64))
IV0, IV1, IV2, IV3 = (tl.constexpr(word) for word in (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A))
# The context key: BLAKE3's hash of "verbatim 2026 leaf" in mode DERIVE_KEY_CONTEXT (a test computes it again).
K0, K1, K2, K3 = (tl.constexpr(word) for word in (0xD8CA11D9, 0xC1B037EC, 0x626D797C, 0x229A5A24))
K4, K5, K6, K7 = (tl.constexpr(word) for word in (0x3A331261, 0x59546FD9, 0xF21040A9, 0x3271E962))


@triton.jit
def _rotate(x, BITS: tl.constexpr):
    """u32 rotated right."""
    return (x >> BITS) | (x << (32 - BITS))


@triton.jit
def _quarter(a, b, c, d, x, y, one):
    """BLAKE3's G on four words of the state and two of the message; `one` is 1."""
    a = (a + x) + b * one
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = (a + y) + b * one
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _compress(h, m, counter, length, flags, one):
    """The chaining value after a block: h 8 words, m 16 words, all u32 [lanes]; counter, length, flags u32."""
    v0, v1, v2, v3, v4, v5, v6, v7 = h
    zero = h[0] & 0
    v8, v9, v10, v11 = zero + IV0, zero + IV1, zero + IV2, zero + IV3
    v12, v13, v14, v15 = zero + counter, zero, zero + length, zero + flags
    for _ in tl.static_range(7):
        v0, v4, v8, v12 = _quarter(v0, v4, v8, v12, m[0], m[1], one)
        v1, v5, v9, v13 = _quarter(v1, v5, v9, v13, m[2], m[3], one)
        v2, v6, v10, v14 = _quarter(v2, v6, v10, v14, m[4], m[5], one)
        v3, v7, v11, v15 = _quarter(v3, v7, v11, v15, m[6], m[7], one)
        v0, v5, v10, v15 = _quarter(v0, v5, v10, v15, m[8], m[9], one)
        v1, v6, v11, v12 = _quarter(v1, v6, v11, v12, m[10], m[11], one)
        v2, v7, v8, v13 = _quarter(v2, v7, v8, v13, m[12], m[13], one)
        v3, v4, v9, v14 = _quarter(v3, v4, v9, v14, m[14], m[15], one)
        m = (m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8])
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _key(lanes):
    """The context key as a chaining value of every lane."""
    zero = lanes.to(tl.uint32) & 0
    return zero + K0, zero + K1, zero + K2, zero + K3, zero + K4, zero + K5, zero + K6, zero + K7


@triton.jit
def _four(pointers, mask):
    """Four neighbouring words of each lane in one load: tile of pointers [lanes, 4] → 4 × u32 [lanes]."""
    tile = tl.load(pointers, mask, 0).to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _load(pointers, step, mask):
    """The 8 words of each lane's chaining value at pointers [lanes], `step` apart."""
    return [_word(pointers + i * step, mask) for i in (0, 1, 2, 3, 4, 5, 6, 7)]


@triton.jit
def _word(pointers, mask):
    return tl.load(pointers, mask, 0).to(tl.uint32, bitcast=True)


@triton.jit
def _store(pointers, step, h, mask):
    """The 8 words of each lane's chaining value to pointers [lanes], `step` apart."""
    for i in tl.static_range(8):
        tl.store(pointers + i * step, h[i].to(tl.int32, bitcast=True), mask)


@triton.jit
def _either(mask, a, b):
    """The chaining value a where the mask holds, else b."""
    return [tl.where(mask, a[i], b[i]) for i in (0, 1, 2, 3, 4, 5, 6, 7)]


@triton.jit(do_not_specialize=["first", "words", "chunks", "leaf_words", "leaf_chunks", "nodes_apart", "tiles", "one"])
def chunk_kernel(
    table,
    nodes,
    first,
    words,
    chunks,
    leaf_words,
    leaf_chunks,
    nodes_apart,
    tiles,
    one,
    ALIGNED: tl.constexpr,
    RAGGED: tl.constexpr,
    LANES: tl.constexpr,
):
    """Chaining values of the chunks of all leaves of some tensors of `words` words, `tiles` programs to each.

    table i64: addresses, from `first` on → nodes i32[8, nodes_apart], a leaf every `leaf_chunks`. RAGGED: some chunks
    are shorter. ALIGNED: each begins at a multiple of 16 bytes.
    """
    tensor = tl.program_id(0) // tiles
    x = tl.load(table + (first + tensor)).to(tl.pointer_type(tl.int32))
    chunk = (tl.program_id(0) % tiles) * LANES + tl.arange(0, LANES)
    live = chunk < chunks
    leaf, counter = chunk // leaf_chunks, chunk % leaf_chunks
    if RAGGED:
        start = leaf.to(tl.int64) * leaf_words + counter * CHUNK_WORDS
        stop = tl.minimum((leaf + 1).to(tl.int64) * leaf_words, words)
        size = tl.minimum(stop - start, CHUNK_WORDS).to(tl.int32)
    else:  # the chunks of all leaves follow one another
        start = chunk.to(tl.int64) * CHUNK_WORDS
        size = tl.full((LANES,), CHUNK_WORDS, tl.int32)
    last = (size - 1) // BLOCK_WORDS
    blocks = tl.max(last, 0) + 1 if RAGGED else CHUNK_WORDS // BLOCK_WORDS
    end = END + tl.where(tl.minimum(leaf_chunks, chunks - leaf * leaf_chunks) == 1, ROOT, 0)
    word = tl.arange(0, 4)[None, :]
    here = live[:, None]
    h = _key(chunk)
    block = 0
    while block < blocks:
        at = block * BLOCK_WORDS
        left = (size - at)[:, None]
        pointers = x + (start[:, None] + at + word)
        if ALIGNED:  # which the compiler can't see of an address from memory: four words are one load then
            pointers = tl.multiple_of(pointers, (16, 16))
        a = _four(pointers, here & (word < left) if RAGGED else here)
        b = _four(pointers + 4, here & (word + 4 < left) if RAGGED else here)
        c = _four(pointers + 8, here & (word + 8 < left) if RAGGED else here)
        d = _four(pointers + 12, here & (word + 12 < left) if RAGGED else here)
        length = 4 * tl.minimum(size - at, BLOCK_WORDS)
        flags = MATERIAL + tl.where(block == 0, START, 0) + tl.where(block == last, end, 0)
        new = _compress(h, a + b + c + d, counter.to(tl.uint32), length.to(tl.uint32), flags.to(tl.uint32), one)
        h = _either(block <= last, new, h) if RAGGED else new
        block += 1
    leaves = (chunks + leaf_chunks - 1) // leaf_chunks
    _store(nodes + (tensor * leaves * leaf_chunks + chunk), nodes_apart, h, live)


@triton.jit(do_not_specialize=["chunks", "leaf_chunks", "leaves", "count", "one"])
def merge_kernel(nodes, out, chunks, leaf_chunks, leaves, count, one, LEAVES: tl.constexpr, LANES: tl.constexpr):
    """The roots of the trees of `count` leaves, `leaves` to a tensor of `chunks` chunks.

    nodes i32[2, 8, count · leaf_chunks], the second half unset → out i32[count, 8].
    """
    first = tl.program_id(0) * LEAVES
    apart = count * leaf_chunks
    source, target = nodes, nodes + apart.to(tl.int64) * 8
    level, widest = 0, leaf_chunks
    while widest > 1:
        half = (widest + 1) // 2
        base = 0
        while base < LEAVES * half:
            lane = base + tl.arange(0, LANES)
            leaf, i = first + lane // half, lane % half
            origin = leaf * leaf_chunks
            size = tl.minimum(leaf_chunks, chunks - (leaf % leaves) * leaf_chunks)
            size = (size + (1 << level) - 1) >> level  # nodes of this leaf here
            live = (lane < LEAVES * half) & (leaf < count) & (2 * i < size)
            pair = live & (2 * i + 1 < size)
            left = _load(source + origin + 2 * i, apart, live)
            right = _load(source + origin + 2 * i + 1, apart, pair)
            flags = MATERIAL + PARENT + tl.where(size == 2, ROOT, 0)
            parent = _compress(_key(lane), left + right, 0, 4 * BLOCK_WORDS, flags.to(tl.uint32), one)
            _store(target + origin + i, apart, _either(pair, parent, left), live)
            base += LANES
        tl.debug_barrier()  # what this program wrote, all its threads may read
        source, target = target, source
        level += 1
        widest = half
    lane = tl.arange(0, 8 * LEAVES)
    leaf = first + lane // 8
    words = tl.load(source + leaf * leaf_chunks + (lane % 8) * apart, leaf < count)
    tl.store(out + first * 8 + lane, words, leaf < count)
