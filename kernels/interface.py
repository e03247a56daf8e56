"""What every backend provides: the same functions, over the same few types.

A backend is a module. Choosing one is choosing a device; no choice changes a bit. Arrays live on the backend's
device in whatever type it likes: NumPy's here, a torch tensor there. What crosses over goes through `to_device`
and `to_host`, which do nothing where the device is the host. Shape letters, here and in the backends:

    T tokens of a unit   D model width   O, I rows and columns of a weight   F feed-forward width   V vocabulary
    H query heads   K key/value heads   E head width   N windows of a unit (T = N · sequence length)

bf16 arrays hold the sixteen bits of each value (uint16 on the host). `flag` is a mutable one-element array that
an operation sets to 1 when it meets a value that is not finite, or too large for a fixed-point sum; what it
then returns is defined and finite, but the step it belongs to is void.

    NAME; describe() -> dict for segment records and certificates
    to_device(array) -> the backend's own, perhaps of the same memory; the backend's own stays what it is
    to_host(x) -> np.ndarray, perhaps of the same memory
    device_memory() -> bytes that are free on a device of its own, for which model/device_memory.py counts; else None
    new_flag() -> flag
    new_sums(shape) -> i64[shape], zeros
    leaves_of(tensors f32 or i64, by name) -> the leaf digests of each, by name, as kernels.digest.leaves
    initial_weights(seed, name, shape, std) -> f32[shape]
    embed(table f32[V,D], tokens i64[T]) -> bf16[T,D]
    norm_bf16(x bf16[T,D], gain f32[D], eps, flag) -> (bf16[T,D], r f32[T])
    quantise_weight(w f32[O,I], rule, flag) -> Weight
    weight_of(hi int8[O,I], scale f32[O]) -> Weight, from codes that were made elsewhere
    norm_rows(x bf16[T,D], gain f32[D], eps, slices, flag) -> (Rows[T,D], r f32[T])
    quantise_rows(x bf16[R,C], slices, flag) -> Rows[R,C]
    project(x Rows[T,I], w Weight[O,I]) -> bf16[T,O]
    project_add(x Rows[T,I], w Weight[O,I], residual bf16[T,O]) -> bf16[T,O]
    rotate_rows(y bf16[T,H·E], rope, eps, query, flag) -> Rows[T·H,E]
    rotate_backward(dz f32[T·H,E], y bf16[T,H·E], rope, eps, flag) -> bf16[T,H·E]
    attention(q, k, v, shape) -> Attended
    attention_backward(q, k, v, out, d_out bf16[T,H·E], shape, flag) -> (dq f32[T·H,E], dk f32[T·K,E], dv bf16[T,K·E])
    swiglu_rows(gate_up bf16[T,2F], slices, flag) -> Rows[T,F]
    swiglu_backward(dh bf16[T,F], gate_up bf16[T,2F]) -> bf16[T,2F], in gate_up's memory
    linear_backward(x Rows[T,I], parts, slices GradientSlices, flag) -> bf16[T,I]; adds to each part's sums
    norm_backward(dy bf16[T,D], x bf16[T,D], r f32[T], gain f32[D], residual bf16[T,D] | None, sums i64[D], flag)
        -> bf16[T,D]
    head(x Rows[T,D], w Weight[V,D], targets i64[T], flag) -> (nll i64, lse2 i64), for int() to fetch
    head_backward(x, w, targets, two_z, sums i64[V,D], flag) -> (nll, lse2, dx bf16[T,D])
    embed_backward(dx bf16[T,D], tokens i64[T], sums i64[V,D], flag)
    square_rows(sums i64[R,...], scale) -> f32[R]; here and below sums may be f32, as the ordered reduction gives them
    fixed_sum(x f32[R,C], flag) -> f32[R]
    adamw(p, m, v f32[...], sums i64[...], scalars: AdamScalars)   in place
"""

from typing import Any, NamedTuple

import numpy as np

CONTRACT = "verbatim-2026.1"
INT8_MAX = 127  # one slice
INT16_MAX = 32512  # two slices: 127 · 256
GRADIENT_BITS = 24  # every gradient and loss sum counts in units of 2⁻²⁴
LSE2_BITS = 20  # the sum of squared log-normalisers counts in units of 2⁻²⁰
SUM_LIMIT = 27  # one unit's gradient stays below 2²⁷, so that 4,096 units stay below 2⁶³
HEAD_LIMIT = 26  # the head's softmax part and its target part each, which join in one gradient
LSE2_LIMIT = 31  # one unit's squared log-normalisers stay below 2³¹


class Rows(NamedTuple):
    """Rows of integers with one scale each: value = (hi · 256 + lo) · scale, or hi · scale where lo is None."""

    hi: Any  # int8 [R, C]
    lo: Any  # int8 [R, C] or None
    scale: Any  # f32 [R]


class Weight(NamedTuple):
    """A weight as int8 rows with one scale each. `layout` is a backend's own copy of the same integers, if it likes
    one."""

    hi: Any  # int8 [O, I]
    scale: Any  # f32 [O]
    layout: Any = None


class Part(NamedTuple):
    """One weight that read the same input: its output gradient, the weight, and the int64 sums of its gradient."""

    dy: Any  # bf16 [T, O]
    weight: Weight
    sums: Any  # i64 [O, I], units of 2⁻²⁴


class GradientSlices(NamedTuple):
    """Slices, 1 or 2, of an output gradient on its way to each of a linear's two products."""

    input: int
    weight: int


class Rope(NamedTuple):
    """Rotary tables of one window: cosines and sines, f32 [sequence, E/2]."""

    cos: Any
    sin: Any


class AttentionShape(NamedTuple):
    """Heads, key/value heads, head width, sequence length, and how many keys a query sees (its own included)."""

    heads: int
    kv_heads: int
    width: int
    sequence: int
    window: int


class Attended(NamedTuple):
    """An attention's output and what its backward needs: the rows' maxima (in bits of exponent) and sums (units of
    2⁻¹⁸)."""

    out: Any  # bf16 [T, H·E]
    peak: Any  # f32 [T, H]
    total: Any  # int32 [T, H]


class AdamScalars(NamedTuple):
    """The numbers of one AdamW update, each rounded once from its exact value."""

    mean: np.float32  # 2⁻²⁴ / tokens of the step
    clip: np.float32  # min(1, limit / (norm + 1e-6))
    lr: np.float32
    decay: np.float32  # 1 − lr · weight decay, or 1
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    correction1: np.float32  # 1 / (1 − β1ᵗ)
    correction2: np.float32  # 1 / (1 − β2ᵗ)
    eps: np.float32
