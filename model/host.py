"""Host numbers: exact decimals and integers, rounded once to float32.

Learning rates, powers of beta and RoPE tables reach every bit of the state, so none of them may pass through libm or
through float64. A decimal such as "0.9" is the fraction 9/10; roots, powers and cosines are taken at PRECISION bits by
mpmath in a context of its own; the last act is one rounding to nearest even, done in Python integers.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np

from kernels.interface import GRADIENT_BITS, AdamScalars

if TYPE_CHECKING:
    from model.spec import OptimizerSpec

PRECISION = 256
# A context of our own: the global precision of mpmath belongs to the caller and may change under other threads.
MP: Any = mpmath.ctx_mp.MPContext()
MP.prec = PRECISION

_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", re.ASCII)
_TABLE_BITS = 128


def exact(text: str) -> Fraction:
    """The value of a plain decimal such as "0.0003"; raises ValueError for exponents, signs like "+", NaN or spaces."""
    if not isinstance(text, str) or not _DECIMAL.fullmatch(text):
        raise ValueError(
            f'not a plain decimal: {text!r}; write digits with an optional point, such as "0.0003"'
            " (an exponent or a YAML number without quotes is not exact)"
        )
    return Fraction(text)


def real(value: int | Fraction | str) -> Any:
    """The value as an mpf of PRECISION bits."""
    ratio = exact(value) if isinstance(value, str) else Fraction(value)
    return MP.mpf(ratio.numerator) / ratio.denominator


def as_fraction(value: Any) -> Fraction:
    """The exact value of an int, Fraction, plain decimal, finite float32 or mpf."""
    if isinstance(value, str):
        return exact(value)
    if hasattr(value, "_mpf_"):
        sign, mantissa, exponent, _ = value._mpf_
        if mantissa == 0 and exponent != 0:
            raise ValueError(f"not a finite number: {value}")
        signed = -int(mantissa) if sign else int(mantissa)
        return Fraction(signed << exponent) if exponent >= 0 else Fraction(signed, 1 << -exponent)
    if isinstance(value, np.float32):
        if not np.isfinite(value):
            raise ValueError(f"not a finite number: {value}")
        return Fraction(*value.as_integer_ratio())
    if isinstance(value, (int, Fraction)) and not isinstance(value, bool):
        return Fraction(value)
    kind = type(value).__name__
    raise TypeError(f"{kind} is not exact: a host number is an int, Fraction, decimal string, mpf or float32")


def _round_ratio(numerator: int, denominator: int) -> int:
    """Bits of the float32 nearest to numerator/denominator >= 0, ties to even."""
    if numerator == 0:
        return 0
    exponent = numerator.bit_length() - denominator.bit_length()
    if (numerator << max(-exponent, 0)) < (denominator << max(exponent, 0)):
        exponent -= 1  # now 2^exponent <= value < 2^(exponent + 1)
    quantum = max(exponent - 23, -149)  # subnormals share the quantum 2^-149
    mantissa, rest = divmod(numerator << max(-quantum, 0), denominator << max(quantum, 0))
    twice, whole = 2 * rest, denominator << max(quantum, 0)
    if twice > whole or (twice == whole and mantissa & 1):
        mantissa += 1
    # A mantissa of 2^24 carries into the exponent field by itself, and a subnormal has field 0.
    return ((quantum + 149) << 23) + mantissa


def f32(value: Any) -> np.float32:
    """Nearest float32 (ties to even) of an int, Fraction, plain decimal, mpf or float32; zero is +0.

    Raises OverflowError where the rounded value would be infinite: no host constant may be.
    """
    ratio = as_fraction(value)
    bits = _round_ratio(abs(ratio.numerator), ratio.denominator)
    if bits >= 0x7F800000:
        size = abs(ratio.numerator).bit_length() - ratio.denominator.bit_length()
        raise OverflowError(f"a host number of about 2^{size} exceeds float32, whose largest is below 2^128")
    return np.uint32(bits | (0x80000000 if ratio < 0 else 0)).view(np.float32)


def mean_scale(tokens: int, bits: int = GRADIENT_BITS) -> np.float32:
    """f32(2^-bits / tokens): turns a sum of 2^-bits steps over tokens, already rounded to float32, into a mean."""
    if tokens < 1:
        raise ValueError(f"a mean over {tokens} tokens does not exist; at least 1 is needed")
    return f32(Fraction(1, tokens << bits))


def _bias_correction(beta: str, t: int) -> np.float32:
    return f32(1 / (1 - real(beta) ** t))


def adam_scalars(
    spec: OptimizerSpec, lr: np.float32, t: int, decays: bool, mean: np.float32, clip: np.float32
) -> AdamScalars:
    """Constants of update number t (from 1). lr enters exactly as the float32 which the ledger records."""
    if t < 1:
        raise ValueError(f"AdamW's update number is {t}; updates count from 1")
    kept = 1 - as_fraction(lr) * exact(spec.weight_decay) if decays else Fraction(1)
    beta1, beta2 = exact(spec.beta1), exact(spec.beta2)
    return AdamScalars(
        mean=mean,
        clip=clip,
        lr=lr,
        decay=f32(kept),
        beta1=f32(beta1),
        one_minus_beta1=f32(1 - beta1),
        beta2=f32(beta2),
        one_minus_beta2=f32(1 - beta2),
        correction1=_bias_correction(spec.beta1, t),
        correction2=_bias_correction(spec.beta2, t),
        eps=f32(spec.eps),
    )


def _round_table(value: int) -> int:
    """float32 bits of the integer value, in units of 2^-128."""
    size = abs(value)
    shift = size.bit_length() - 24
    if shift <= 0:  # too small to need rounding: below 2^-104, still a normal number
        bits = _round_ratio(size, 1 << _TABLE_BITS)
    else:
        half = 1 << (shift - 1)
        mantissa = (size + half - 1 + ((size >> shift) & 1)) >> shift  # nearest, ties to even
        bits = ((shift - _TABLE_BITS + 149) << 23) + mantissa
    return bits | 0x80000000 if value < 0 else bits


def _turns(angle: Any, count: int) -> tuple[list[int], list[int]]:
    """float32 bits of cos(t*angle) and sin(t*angle), t = 0 … count-1, by exact rotation in units of 2^-128."""
    scale = MP.mpf(2) ** _TABLE_BITS
    cos1, sin1 = int(MP.nint(MP.cos(angle) * scale)), int(MP.nint(MP.sin(angle) * scale))
    half = 1 << (_TABLE_BITS - 1)
    cos, sin = 1 << _TABLE_BITS, 0
    cosines, sines = [], []
    for _ in range(count):
        cosines.append(_round_table(cos))
        sines.append(_round_table(sin))
        cos, sin = (
            (cos * cos1 - sin * sin1 + half) >> _TABLE_BITS,
            (sin * cos1 + cos * sin1 + half) >> _TABLE_BITS,
        )
    return cosines, sines


@lru_cache(maxsize=8)
def rope_tables(seq_len: int, head_dim: int, theta: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), each float32 [seq_len, head_dim/2] and read-only: angle t * theta^(-2i/head_dim).

    Each rotation adds at most about 2^-127, so 4,096 positions keep an error below 2^-114 before the one rounding.
    """
    pairs = head_dim // 2
    cos = np.empty((pairs, seq_len), np.uint32)
    sin = np.empty((pairs, seq_len), np.uint32)
    for i in range(pairs):
        angle = MP.power(MP.mpf(theta), -(MP.mpf(2 * i) / head_dim))
        cos[i], sin[i] = _turns(angle, seq_len)
    tables = np.ascontiguousarray(cos.T).view(np.float32), np.ascontiguousarray(sin.T).view(np.float32)
    for table in tables:
        table.setflags(write=False)
    return tables
