"""The contract's numbers inside compiled code: every function here is inlined into the kernels of this package.

Numba's own conversions are avoided: it takes int32·float32 and bare literals to float64, promotes int32 to int64, and
rounds int64 → float32 twice. So conversions and int32 operations are emitted here one LLVM instruction at a time, and
each accepts exactly one type: a float64 that slips in is a typing error when a kernel is compiled, not another bit.

    i32 bits of a float   f32 a float32   u16 a bfloat16   i64 a fixed-point sum
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit, types
from numba.core.codegen import get_host_cpu_features
from numba.core.errors import TypingError
from numba.extending import intrinsic

# LLVM uses half of a 512-bit vector on Intel's processors, for fear of lower clocks; the bits are the same either way.
_settings: Any = config
if _settings.CPU_NAME is None and _settings.CPU_FEATURES is None and "+avx512f" in get_host_cpu_features():
    _settings.CPU_FEATURES = f"{get_host_cpu_features()},-prefer-256-bit"

CALLED: dict[str, Any] = {"cache": True, "fastmath": False, "error_model": "numpy", "no_cfunc_wrapper": True}
PARALLEL: dict[str, Any] = {**CALLED, "parallel": True}
SERIAL: dict[str, Any] = {**CALLED, "nogil": True}  # one thread's work, beside others'
OPTIONS: dict[str, Any] = {**CALLED, "no_cpython_wrapper": True}  # only kernels call these

F0, F1, F256 = np.float32(0), np.float32(1), np.float32(256)
I0 = np.int32(0)
SIGN = np.int32(0x7FFFFFFF)
INFINITE = np.int32(0x7F800000)  # the bits of +∞; every NaN's magnitude is larger
STORE_FLOOR = np.int32(np.float32(2.0**-100).view(np.int32))
ROW_FLOOR = np.int32(np.float32(2.0**-64).view(np.int32))
CODE = (np.float32(127), np.float32(32512))  # the largest code for one and for two slices
CODE_RECIPROCAL = (F1 / CODE[0], F1 / CODE[1])
I23, I127, I61, I100, I128, I8 = (np.int32(i) for i in (23, 127, 61, 100, 128, 8))


def _floats(bits: str) -> tuple[np.float32, ...]:
    return tuple(np.uint32(int(word, 16)).view(np.float32) for word in bits.split())


# The contract's polynomials, constant term first; equal to the reference's by a test.
EXP2 = _floats("3f800000 3f317219 3e75fdf3 3d6356d3 3c1d90e3 3aafe004 3925e3e9")
LOG2 = _floats("3fb8aa3b bf38aa33 3ef638b6 beb8b02d 3e93af55 be74d1e0 3e534979 be49cb90 3e3544ab bda97e65")
NORMAL = _floats("3f99baaa 3d229f92 4077ce92 c1cad0a3 42b87536 c33dc72f 435f5b3a c30c013e 4211bf05")
LOG2_E = _floats("3fb8aa3b")[0]
LN_2 = _floats("3f317218")[0]
ROOT_HALF_BITS = np.int32(0x3F3504F3)
EXP2_LOW, EXP2_HIGH = np.float32(-32), np.float32(127)

Emit = Callable[[Any, Any, Any], Any]  # (builder, LLVM type of the result, operands) → value


def _check(operation: str, wanted: types.Type, *given: types.Type) -> None:
    for type_ in given:
        if type_ != wanted:
            raise TypingError(f"{operation} takes {wanted}, not {type_}: an implicit conversion may round differently")


def _unary(operation: str, result: types.Type, argument: types.Type, emit: Emit) -> Any:
    @intrinsic
    def function(typingctx: Any, x: Any) -> Any:
        _check(operation, argument, x)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, context.get_value_type(signature.return_type), args)

        return result(argument), code

    return function


def _binary(operation: str, result: types.Type, argument: types.Type, emit: Emit) -> Any:
    @intrinsic
    def function(typingctx: Any, x: Any, y: Any) -> Any:
        _check(operation, argument, x, y)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, context.get_value_type(signature.return_type), args)

        return result(argument, argument), code

    return function


def _llvm(name: str) -> Emit:
    return lambda b, t, a: b.call(b.module.declare_intrinsic(f"llvm.{name}", [t]), a)


_i32, _i64, _f32 = types.int32, types.int64, types.float32
bits = _unary("bits", _i32, _f32, lambda b, t, a: b.bitcast(a[0], t))
from_bits = _unary("from_bits", _f32, _i32, lambda b, t, a: b.bitcast(a[0], t))
f32_of_i32 = _unary("f32_of_i32", _f32, _i32, lambda b, t, a: b.sitofp(a[0], t))  # one rounding, nearest even
f32_of_i64 = _unary("f32_of_i64", _f32, _i64, lambda b, t, a: b.sitofp(a[0], t))  # one rounding, nearest even
i32_of_f32 = _unary("i32_of_f32", _i32, _f32, lambda b, t, a: b.fptosi(a[0], t))  # of whole, bounded numbers
i64_of_f32 = _unary("i64_of_f32", _i64, _f32, lambda b, t, a: b.fptosi(a[0], t))  # of whole, bounded numbers
i32_of_i8 = _unary("i32_of_i8", _i32, types.int8, lambda b, t, a: b.sext(a[0], t))
f32_of_i8 = _unary("f32_of_i8", _f32, types.int8, lambda b, t, a: b.sitofp(a[0], t))  # exact
i32_of_u16 = _unary("i32_of_u16", _i32, types.uint16, lambda b, t, a: b.zext(a[0], t))
i8_of_i32 = _unary("i8_of_i32", types.int8, _i32, lambda b, t, a: b.trunc(a[0], t))
u16_of_i32 = _unary("u16_of_i32", types.uint16, _i32, lambda b, t, a: b.trunc(a[0], t))
rint = _unary("rint", _f32, _f32, _llvm("rint"))  # nearest even
sqrt = _unary("sqrt", _f32, _f32, _llvm("sqrt"))  # correctly rounded
add = _binary("add", _i32, _i32, lambda b, t, a: b.add(*a))
sub = _binary("sub", _i32, _i32, lambda b, t, a: b.sub(*a))
shl = _binary("shl", _i32, _i32, lambda b, t, a: b.shl(*a))
sar = _binary("sar", _i32, _i32, lambda b, t, a: b.ashr(*a))
shr = _binary("shr", _i32, _i32, lambda b, t, a: b.lshr(*a))
both = _binary("both", _i32, _i32, lambda b, t, a: b.and_(*a))
xor = _binary("xor", _i32, _i32, lambda b, t, a: b.xor(*a))
largest = _binary("largest", _i32, _i32, lambda b, t, a: b.select(b.icmp_signed(">", *a), *a))
smallest = _binary("smallest", _i32, _i32, lambda b, t, a: b.select(b.icmp_signed("<", *a), *a))


@intrinsic
def f32_of_gradient(typingctx: Any, x: Any) -> Any:
    """A gradient as f32: an i64 sum rounded once, the f32 mean of an ordered reduction as it is."""
    if x != _f32:
        _check("f32_of_gradient", _i64, x)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0] if x == _f32 else builder.sitofp(args[0], context.get_value_type(_f32))

    return _f32(x), code


@intrinsic
def choose(typingctx: Any, condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`, both of one type; both are computed and there is no branch."""
    _check("choose", types.boolean, condition)
    _check("choose", yes, no)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(*args)

    return yes(condition, yes, no), code


@njit(**OPTIONS)
def all_done(done, count):
    """MemoryError unless every pass of a parallel loop got to its end.

    Numba drops what a thread raises: where one cannot allocate its work space, the rest of its rows would stay as they
    were. So each loop that allocates counts its passes.
    """
    if done != count:
        raise MemoryError("a thread could not allocate its work space")


@njit(**OPTIONS)
def as_floats(products):
    """The same memory as f32: a product is overwritten in place by the number made of it."""
    return products.view(np.float32)


@njit(**OPTIONS)
def magnitude(x):
    """The bits of |x|, i32: they compare as the values do, and a NaN is the largest of all."""
    return both(bits(x), SIGN)


@njit(**OPTIONS)
def absolute(x):
    """|x|."""
    return from_bits(magnitude(x))


@njit(**OPTIONS)
def order_key(x):
    """f32 → an i32 that compares as the value does (−0 below +0); order_key of its own bits brings it back."""
    return key_bits(bits(x))


@njit(**OPTIONS)
def key_bits(b):
    """The map between a float's bits and its order key, its own inverse."""
    return xor(b, both(sar(b, np.int32(31)), SIGN))


@njit(**OPTIONS)
def f32_of_bf16(x):
    """bf16 → f32, exact."""
    return from_bits(shl(i32_of_u16(x), np.int32(16)))


@njit(**OPTIONS)
def bf16(x):
    """f32 → bf16, nearest even; |x| < 2⁻¹⁰⁰ becomes +0, a NaN the one quiet NaN."""
    b = bits(x)
    size = both(b, SIGN)
    rounded = shr(add(add(b, np.int32(0x7FFF)), both(shr(b, np.int32(16)), np.int32(1))), np.int32(16))
    rounded = choose(size < STORE_FLOOR, I0, rounded)
    return u16_of_i32(choose(size > INFINITE, np.int32(0x7FC0), rounded))


@njit(**OPTIONS)
def floor(x, floor_bits):
    """+0 where |x| is below the value with these bits."""
    return choose(magnitude(x) < floor_bits, F0, x)


@njit(**OPTIONS)
def power_of_two(k):
    """2^k for an i32 −126 ≤ k ≤ 127."""
    return from_bits(shl(add(k, I127), I23))


@njit(**OPTIONS)
def exp2(x):
    """2^x; below −32 and for NaN +0; above 127 as 127."""
    inside = x >= EXP2_LOW
    x = choose(inside, x, F0)
    x = choose(x > EXP2_HIGH, EXP2_HIGH, x)
    whole = rint(x)
    r = x - whole
    p = EXP2[6]
    p = p * r + EXP2[5]
    p = p * r + EXP2[4]
    p = p * r + EXP2[3]
    p = p * r + EXP2[2]
    p = p * r + EXP2[1]
    p = p * r + EXP2[0]
    return choose(inside, from_bits(add(bits(p), shl(i32_of_f32(whole), I23))), F0)


@njit(**OPTIONS)
def log2(x):
    """log₂ of a positive normal number; no meaning for others."""
    b = bits(x)
    exponent = sar(sub(b, ROOT_HALF_BITS), I23)
    t = from_bits(sub(b, shl(exponent, I23))) - F1
    p = LOG2[9]
    p = p * t + LOG2[8]
    p = p * t + LOG2[7]
    p = p * t + LOG2[6]
    p = p * t + LOG2[5]
    p = p * t + LOG2[4]
    p = p * t + LOG2[3]
    p = p * t + LOG2[2]
    p = p * t + LOG2[1]
    p = p * t + LOG2[0]
    return f32_of_i32(exponent) + t * p


@njit(**OPTIONS)
def sigmoid(x):
    """1 ÷ (1 + e^−x); NaN gives 0."""
    e = exp2(-absolute(x) * LOG2_E)
    s = F1 / (F1 + e)
    return choose(x >= F0, s, e * s)


@njit(**OPTIONS)
def row_top(row):
    """The bits of the largest |x| of f32[C]."""
    top = I0
    for j in range(row.size):
        top = largest(top, magnitude(row[j]))
    return top


@njit(**OPTIONS)
def checked_top(top, flag):
    """The bits of a maximum, or 0 with the flag raised where it is not finite."""
    if top >= INFINITE:
        flag[0] = 1
        return I0
    return top


@njit(**OPTIONS)
def scale_of(top, slices):
    """The scale of a finite maximum (as bits) for one or two slices: max · f32(1/Q), 0 below 2⁻⁶⁴."""
    return from_bits(top) * CODE_RECIPROCAL[slices - 1] if top >= ROW_FLOOR else F0


@njit(**OPTIONS)
def inverse_of(top, slices):
    """The multiplier to codes of a finite maximum (as bits): Q ÷ max, 0 below 2⁻⁶⁴."""
    return CODE[slices - 1] / from_bits(top) if top >= ROW_FLOOR else F0


@njit(**OPTIONS)
def code_of(x, inverse):
    """rint(x · inverse) as i32; 0 where the inverse is 0, whatever x is."""
    return i32_of_f32(rint(choose(inverse > F0, x * inverse, F0)))


@njit(**OPTIONS)
def high_of(code):
    """The high slice of a two-slice code, i32 −127…127."""
    return sar(add(code, I128), I8)


@njit(**OPTIONS)
def low_of(code):
    """The low slice of a two-slice code, i32 −128…127."""
    return sub(code, shl(high_of(code), I8))


@njit(**OPTIONS)
def store_codes(row, top, slices, hi, lo):
    """Codes of f32[C] with a finite maximum (as bits) into hi and, for two slices, lo; returns the scale."""
    inverse = inverse_of(top, slices)
    if slices == 1:
        for j in range(row.size):
            hi[j] = i8_of_i32(code_of(row[j], inverse))
    else:
        for j in range(row.size):
            code = code_of(row[j], inverse)
            hi[j] = i8_of_i32(high_of(code))
            lo[j] = i8_of_i32(low_of(code))
    return scale_of(top, slices)


@njit(**OPTIONS)
def quantise_row(row, slices, hi, lo, flag):
    """Quantise f32[C] by its own maximum; returns the scale. `lo` is not touched for one slice."""
    return store_codes(row, checked_top(row_top(row), flag), slices, hi, lo)


@njit(**OPTIONS)
def ceil_log2(n):
    """⌈log₂ n⌉ for n ≥ 1, as i32."""
    result = I0
    while (np.int64(1) << np.int64(result)) < n:
        result = add(result, np.int32(1))
    return result


@njit(**OPTIONS)
def sum_exponent(top, terms):
    """The k of a fixed sum of `terms` values whose largest magnitude has these bits: min(61 − ⌈log₂ n⌉ − E, 100)."""
    exponent = sub(sar(top, I23), I127)
    return smallest(sub(sub(I61, ceil_log2(terms)), exponent), I100)


@njit(**OPTIONS)
def fixed_sum_row(row, flag):
    """The sum of f32[C] in a fixed point chosen from its maximum, rounded once; not finite or beyond f32: flag, 0."""
    top = checked_top(row_top(row), flag)
    if top == 0:
        return F0
    k = sum_exponent(top, row.size)
    factor = power_of_two(k)
    total = np.int64(0)
    for j in range(row.size):
        total += i64_of_f32(rint(row[j] * factor))
    result = f32_of_i64(total) * power_of_two(sub(I0, k))
    if magnitude(result) >= INFINITE:
        flag[0] = 1
        return F0
    return result


@njit(**OPTIONS)
def fixed_point(x, factor, terms, limit):
    """rint(x · factor) as i64, or 0 where fixed_point_bad(x, terms, limit)."""
    return i64_of_f32(rint(choose(absolute(x) * terms < limit, x, F0) * factor))


@njit(**OPTIONS)
def fixed_point_bad(x, terms, limit):
    """Whether |x| · terms reaches the limit or x is not finite."""
    return not (absolute(x) * terms < limit)
