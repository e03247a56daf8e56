"""One trajectory from worlds of 1, 2, 3, 4 and 6 processes, joined in batches of 1, 2 and 4 units; ends with its root.

    python -m tests.worlds.run [--short]

The plain process goes first, without any group. Then every world does the run's first steps in every batch, and one
trajectory changes worlds every second step. Every field of every record, of every rank, must be the plain one's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kernels import canonical, digest
from model.rows import idle, ownership
from model.spec import RunSpec
from tests.worlds import world
from tests.worlds.world import Done, Part, in_turn, together

NAN = 0x7FC00000
KINDS = ("gradients", "codes", "tables", "squares", "digests", "scalars")


def parts(short: bool) -> tuple[list[Part], list[list[Part]]]:
    """(worlds that each begin the run, trajectories that change worlds)."""
    sizes, batches = ((1, 2, 3), (2,)) if short else ((1, 2, 3, 4, 6), (1, 2, 4))
    each = [Part(size, batch, 3 if short else 5) for size in sizes for batch in batches]
    each += [Part(2, 2, 2, "generic:cpu"), Part(3, 2, 1, "reference")]
    each += [Part(3, 2, 3, device=True), Part(2, 1, 2, "generic:cpu", device=True)]
    if short:
        return each, [[Part(3, 2, 2), Part(1, 1, 1), Part(2, None, 3)]]
    order = ((6, 1), (1, 4), (4, 2), (2, 1), (3, 4), (6, 2))
    return each, [
        [Part(size, batch, 2) for size, batch in order],
        [Part(size, batch, 2) for size, batch in order[::-1]],
    ]


def check(short: bool) -> Iterator[str]:
    """Lines of a report; AssertionError where a record is not the plain process's."""
    run = world.spec()
    each, chains = parts(short)
    plain, spoiled = together(run, Part(0, None, 12)), ("head", 1400, NAN)
    void = together(run, Part(0, None, 2, plant=spoiled))
    assert void.records[0]["event"] == "nonfinite" and void.records[0]["gradient"] is None
    yield from header(run, plain)
    for part in each:
        done = together(run, part)
        assert done.records == plain.records[: part.steps], f"{part}: {differing(done, plain)}"
        yield line(part, done)
    for chain in chains:
        found = list(in_turn(run, chain))
        records = [record for done in found for record in done.records]
        assert records == plain.records[: len(records)], f"{chain} is not what one process did"
        assert len(records) < 12 or found[-1].held_out == plain.held_out
        yield "equal from one trajectory of " + ", ".join(f"{p.steps} steps by {p.size}" for p in chain)
    for size in (3,) if short else (2, 3, 6):
        assert together(run, Part(size, 2, 2, plant=spoiled)).records == void.records, size
    yield "equal where a value in one rank's rows is not finite: the step is void on every rank"
    yield f"trajectory root {trajectory_root(plain)}"


def trajectory_root(done: Done) -> str:
    """One digest over the state roots in order."""
    return digest.digest(canonical.dumps([record["state"] for record in done.records]), "state")


def differing(done: Done, plain: Done) -> str:
    """The first step and the fields in which a record differs."""
    for found, expected in zip(done.records, plain.records, strict=False):
        if fields := [name for name in expected if found[name] != expected[name]]:
            return f"step {expected['step']}: {', '.join(fields)}"
    return "another number of steps"


def header(run: RunSpec, plain: Done) -> Iterator[str]:
    """What the table's columns say."""
    shared = [name for name, spans in ownership(run.model, 3).spans.items() if len(spans) > 1]
    yield f"{run.model.parameter_count():,} parameters; of {' and '.join(shared)} three ranks own some rows each"
    yield f"one process without a group: {1e3 * plain.figures[0]['step']:.0f} ms a step"
    yield "times in ms a step and rank; sent: KB that leave a rank in a step"
    columns = ("ranks", "batch", "backend", "idle turns", "step", "waiting", "hashing", *(f"sent: {k}" for k in KINDS))
    yield "  ".join(columns)


def line(part: Part, done: Done) -> str:
    """What one world counted, on the rank that sent most."""
    most = max(done.figures, key=lambda figures: sum(figures["sent"].values()))
    units = [record["windows"] for record in done.records]
    seconds = most["seconds"]
    waiting = sum(value for kind, value in seconds.items() if kind != "hashing")
    unused = sum(idle(count, part.size) for count in units)
    times = (most["step"], waiting / part.steps, seconds["hashing"] / part.steps)
    sent = (most["sent"].get(kind, 0) / part.steps / 1e3 for kind in KINDS)
    figures = [f"{unused} of {unused + sum(units)}", *(f"{1e3 * t:.1f}" for t in times), *(f"{kb:.1f}" for kb in sent)]
    return "  ".join((f"{part.size}", str(part.batch), part.backend, *figures))


def main() -> None:
    """Print the report; exit with an error where anything differs."""
    for text in check(short="--short" in sys.argv[1:]):
        print(text, flush=True)


if __name__ == "__main__":
    main()
