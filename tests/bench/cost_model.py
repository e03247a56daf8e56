"""What a step of the 1.608 B recipe would take on many GPUs, from what one GPU was measured to take and bytes to move.

    python -m tests.bench.cost_model

    units          turns of the rank with most × the time of a unit (turns that go unused are counted)
    rows           AdamW, digests and codes of the rows that a rank owns: of one GPU's time, its share
    whole          what every rank does for all tensors: layouts, the embedding's table, digests put together of leaves
    reduce         8 bytes a parameter through each node, or each GPU within one: NCCL's ring
    gather         a byte a code, two an element of the embedding
    host           over gloo: rank 0 deals the windows, leaf digests are gathered, rings and trees of small messages

Nothing overlaps here, though much could. Efficiency is one GPU's time ÷ (n × n GPUs' time), of the same batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.bench.shapes import OPEN_1B

# Measured on one and two H200s, 2026-11-30-scaling.md: a line through steps of 64 and 256 windows; what two GPUs took
# for their weights and digests beyond half of one's; 6.43 GB each way in 27.6 ms, copies included.
UNIT_SECONDS = 0.3068  # of 4 windows
ROWS_SECONDS = 0.0925  # weights' codes, optimizer and digests of one GPU
WHOLE_SECONDS = 0.018 + 0.054
NVLINK = 233e9  # bytes a second through a GPU
HOP = 10e-6  # seconds of a step of a ring between GPUs; assumed
LEAF_BYTES = 16e6  # 32 for each 64 KiB of gradient and state
HOST_BYTES, HOST_HOP = 1e9, 100e-6  # gloo: bytes a second of one connection, seconds of a message; assumed
NODE = 8


@dataclass(frozen=True)
class Network:
    """Bytes a second through a node."""

    name: str
    rate: float


SOCKETS = Network("sockets, as the report measured", 1.83e9)
ETHERNET = Network("100 Gb/s a node", 10e9)
FABRIC = Network("8 × 400 Gb/s a node", 320e9)


def step_seconds(gpus: int, units: int, network: Network = FABRIC, unit_windows: int = 4) -> dict[str, float]:
    """Seconds of each part of a step of so many units."""
    parameters = OPEN_1B.parameter_count()
    embedding = OPEN_1B.vocab * OPEN_1B.d_model
    others, rate = (gpus - 1) / gpus, NVLINK if gpus <= NODE else min(NVLINK, network.rate)
    unit = UNIT_SECONDS * unit_windows / 4
    found = {"units": math.ceil(units / gpus) * unit, "rows": ROWS_SECONDS / gpus}
    if gpus == 1:
        return found
    rounds, windows = math.ceil(math.log2(gpus)), units * unit_windows
    spoken = (4 * windows * (OPEN_1B.seq_len + 1) + LEAF_BYTES) * others / HOST_BYTES
    return found | {
        "whole": WHOLE_SECONDS,
        "reduce": 8 * parameters * others / rate + gpus * HOP,
        "gather": (parameters + embedding) * others / rate + gpus * HOP,
        "host": spoken + 4 * rounds * HOST_HOP + 2 * gpus * HOST_HOP,
    }


def efficiency(gpus: int, units: int, network: Network = FABRIC, unit_windows: int = 4) -> float:
    """Of strong scaling from one GPU."""
    one, many = (sum(step_seconds(n, units, network, unit_windows).values()) for n in (1, gpus))
    return one / gpus / many


def main() -> None:
    """The tables, as Markdown."""
    parts = ("units", "rows", "whole", "reduce", "gather", "host")
    print(
        "| GPUs | windows (units) | between nodes | " + " | ".join(f"{part}, ms" for part in parts) + " | efficiency |"
    )
    print("|" + "---|" * (len(parts) + 4))
    cases = [(8, 288, 4, FABRIC)]
    cases += [(48, 288, 4, network) for network in (SOCKETS, ETHERNET, FABRIC)] + [(48, 576, 4, FABRIC)]
    cases += [(1024, 576, 4, FABRIC), (1024, 2304, 1, FABRIC), (1024, 4096, 4, FABRIC), (1024, 4096, 4, ETHERNET)]
    for gpus, units, unit_windows, network in cases:
        seconds = step_seconds(gpus, units, network, unit_windows)
        cells = [f"{gpus:,}", f"{units * unit_windows:,} ({units:,})", network.name if gpus > NODE else "one node"]
        cells += [f"{1e3 * seconds[part]:,.0f}" for part in parts]
        print("| " + " | ".join([*cells, f"{efficiency(gpus, units, network, unit_windows):.0%}"]) + " |")


if __name__ == "__main__":
    main()
