"""Fingerprints of the gradients of a step's units: what a public value, drawn after the step was fixed, makes of them.

    φ[u,t] = Σᵢ ρᵢ·g_u[t]ᵢ mod 2⁶¹ − 1        ρ from Philox keyed by (beacon value, step, t)

Summed over the units u they are the fingerprint of the ledger's gradient G[t], if the units' gradients sum to it. That
holds of integers modulo 2⁶¹ − 1 alone, so what is fingerprinted must be smaller: 2⁶⁰ at most in a sum.
"""

import numpy as np

from kernels import canonical
from kernels.digest import digest
from storage import engine
from storage.errors import Refused

PRIME = 2**61 - 1
BOUND = 2**60  # of a summed gradient, in units of 2⁻²⁴: two numbers below it differ by less than PRIME


def fingerprint(tensor: np.ndarray, beacon: str, step: int, name: str) -> int:
    """φ of one tensor int64 named `name`, of a unit or of the step, under a beacon value of 64 hex digits."""
    key = digest(canonical.dumps({"beacon": beacon, "step": step, "tensor": name}), "fingerprint")
    return engine.fingerprint(tensor, int(key[:16], 16), f"fingerprint {key}")


def fingerprints(gradient: dict[str, np.ndarray], beacon: str, step: int) -> list[int]:
    """φ of every tensor, in name order."""
    return [fingerprint(gradient[name], beacon, step, name) for name in sorted(gradient)]


def chosen_tensor(names: list[str], beacon: str, step: int) -> str:
    """The parameter whose sum and update are opened: each equally likely, for whoever fixed the step."""
    key = digest(canonical.dumps({"beacon": beacon, "step": step}), "opened tensor")
    return sorted(names)[int(key, 16) % len(names)]


def check_size(gradient: dict[str, np.ndarray], units: int, step: int) -> None:
    """Refused where a gradient, one of `units` that are summed, is too large for a fingerprint to bind it."""
    for name, tensor in gradient.items():
        largest = max(abs(int(tensor.min())), abs(int(tensor.max())))
        if largest * units >= BOUND:
            raise Refused(
                f"step {step}: the gradient of {name} reaches {largest}: no fingerprint binds a sum of {units} such",
                next_step=f"audit the whole step: verbatim audit STORE --step {step}",
            )
