"""Derives the polynomials of kernels/reference/constants.py; run it to print them, the tests compare the bits.

Each is the best fit, in the largest weighted error over a fixed grid, found by the exchange algorithm at 160 bits. The
coefficients are then rounded to float32 one after another from the lowest power, the rest fitted again each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath

from model.host import f32

MP: Any = mpmath.ctx_mp.MPContext()
MP.prec = 160
POINTS = 501
Sample = tuple[Any, Any, Any]  # abscissa, target, weight of the error there


def chebyshev_grid(low: Any, high: Any) -> list[Any]:
    """POINTS abscissas from low to high, denser at the ends."""
    low, high = MP.mpf(low), MP.mpf(high)
    return [(low + high) / 2 - (high - low) / 2 * MP.cospi(MP.mpf(i) / (POINTS - 1)) for i in range(POINTS)]


def horner(coefficients: list[Any], x: Any) -> Any:
    """Sum of coefficients[i]·x^i."""
    total = MP.mpf(0)
    for value in reversed(coefficients):
        total = total * x + value
    return total


def errors(samples: list[Sample], fixed: list[Any], free: list[Any]) -> list[Any]:
    """Weighted error of the polynomial fixed + free at each sample."""
    return [(horner(fixed + free, x) - target) * weight for x, target, weight in samples]


def extrema(values: list[Any], count: int) -> list[int]:
    """Indices of the largest error of each run of equal sign, `count` neighbours that hold the largest ones."""
    runs: list[int] = []
    for index, value in enumerate(values):
        if not runs or (value > 0) != (values[runs[-1]] > 0):
            runs.append(index)
        elif abs(value) > abs(values[runs[-1]]):
            runs[-1] = index
    while len(runs) > count:
        runs.pop(0 if abs(values[runs[0]]) < abs(values[runs[-1]]) else -1)
    return runs


def best_fit(samples: list[Sample], fixed: list[Any], degree: int) -> list[Any]:
    """Coefficients from power len(fixed) to degree that make the largest weighted error smallest."""
    lowest, unknowns = len(fixed), degree + 1 - len(fixed)
    usable = [sample for sample in samples if sample[2] * abs(sample[0]) ** lowest > MP.mpf(2) ** -60]
    nodes = [(2 * i + 1) * len(usable) // (2 * unknowns + 2) for i in range(unknowns + 1)]
    free: list[Any] = []
    for _ in range(60):
        matrix, right = MP.matrix(unknowns + 1), MP.matrix(unknowns + 1, 1)
        for row, node in enumerate(nodes):
            x, target, weight = usable[node]
            for column in range(unknowns):
                matrix[row, column] = x ** (lowest + column) * weight
            matrix[row, unknowns] = (-1) ** row
            right[row] = (target - horner(fixed, x)) * weight
        solution = MP.lu_solve(matrix, right)
        free, level = [solution[i] for i in range(unknowns)], abs(solution[unknowns])
        values = errors(usable, fixed, free)
        if max(map(abs, values)) <= level * (1 + MP.mpf(10) ** -9):
            break
        fresh = extrema(values, unknowns + 1)
        if len(fresh) < unknowns + 1 or fresh == nodes:
            break
        nodes = fresh
    return free


def rounded_fit(samples: list[Sample], degree: int, fixed: list[Any]) -> list[int]:
    """float32 bits of all coefficients, `fixed` (exact float32 values) first."""
    chosen = list(fixed)
    while len(chosen) <= degree:
        chosen.append(MP.mpf(float(f32(best_fit(samples, chosen, degree)[0]))))
    return [int(f32(value).view("uint32")) for value in chosen]


def derive_exp2() -> list[int]:
    """2^r on [-1/2, 1/2], relative error; the constant is 1, so that 2^0 is exact."""
    samples = [(r, MP.power(2, r), MP.power(2, -r)) for r in chebyshev_grid(-0.5, 0.5)]
    return rounded_fit(samples, 6, [MP.mpf(1)])


def derive_log2() -> list[int]:
    """P with log2(1+t) = t·P(t), absolute error of the product, for 1+t from √½ to √2."""
    root = MP.sqrt(2)
    grid = [t for t in chebyshev_grid(1 / root - 1, root - 1) if t != 0]
    return rounded_fit([(t, MP.log(1 + t, 2) / t, abs(t)) for t in grid], 9, [])


def derive_normal() -> list[int]:
    """P with z = t·P(t²), absolute error of z, where t is uniform in (-1, 1) and z normal, cut at ±2."""
    share = MP.erf(MP.sqrt(2))
    grid = [MP.cospi((1 - MP.mpf(i) / (POINTS - 1)) / 2) for i in range(1, POINTS)]
    return rounded_fit([(t * t, MP.sqrt(2) * MP.erfinv(t * share) / t, t) for t in grid], 8, [])


DERIVATIONS: dict[str, Callable[[], list[int]]] = {"EXP2": derive_exp2, "LOG2": derive_log2, "NORMAL": derive_normal}

if __name__ == "__main__":
    for name, derive in DERIVATIONS.items():
        print(f'{name} = _floats("{" ".join(f"{bits:08x}" for bits in derive())}")')
