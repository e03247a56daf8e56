"""Runs whose reduction is ordered: the ranks of the order give what one process replays, 22 steps long, in turns.

    python -m tests.worlds.ordered

Ten steps of 12 units, then of 24 (seven replicas: of 14), so that the number of micro-batches changes too. Every field
of every record, of every rank, must be the replay's; another order, or none, gives others.
"""

from __future__ import annotations

from collections.abc import Iterator

from model.ordered import Residual
from model.spec import Exact, NumericsSpec, Ordered, Phase, RunSpec
from tests.model import tiny
from tests.worlds.run import NAN, differing
from tests.worlds.world import Part, in_turn, together

STEPS, SEQ_LEN = 22, 32
ORDERS = [(2, 2), (3, 1), (1, 3)]


def spec(reduction: Exact | Ordered) -> RunSpec:
    """A run that is the same but for its reduction; of a multiple of seven units where that has seven replicas."""
    units = 14 if isinstance(reduction, Ordered) and reduction.replicas == 7 else 12
    numerics = NumericsSpec(reduction=reduction)
    run = tiny.spec(seq_len=SEQ_LEN, windows=units, layers=2, vocab=1500, steps=40, numerics=numerics)
    phases = (Phase(from_tokens=0, windows=units), Phase(from_tokens=10 * units * SEQ_LEN, windows=2 * units))
    return run.model_copy(update={"schedule": run.schedule.model_copy(update={"phases": phases})})


def ordered(replicas: int, shards: int, residual: Residual = "left_fold") -> Ordered:
    """The reduction of a recipe."""
    return Ordered(kind="ordered", replicas=replicas, shards=shards, residual=residual)


def check() -> Iterator[str]:
    """Lines of a report; AssertionError where a record is not the replay's."""
    exact = together(spec(Exact()), Part(0, None, 1)).records[0]
    gradients = {exact["gradient"]}
    for shape in ORDERS:
        reduction = ordered(*shape)
        world, run = reduction.world, spec(reduction)
        replay = together(run, Part(0, None, STEPS))
        assert replay.records[0]["loss"] == exact["loss"]  # summed as integers, whatever the gradient is
        gradients.add(replay.records[0]["gradient"])
        found = list(in_turn(run, [Part(world, None, 9), Part(0, None, 4), Part(world, None, 9)]))
        records = [record for done in found for record in done.records]
        assert records == replay.records, f"{shape}, one process in between"
        sent = max(figures["sent"]["gradients"] for figures in found[0].figures) // 9
        yield f"equal: {shape[0]} × {shape[1]} ranks and their replay; {sent:,} bytes of gradients leave a rank a step"
    assert len(gradients) == len(ORDERS)  # of three parts both trees are (0 + 1) + 2
    run = spec(ordered(2, 2))
    for backend, steps in (("generic:cpu", 2), ("reference", 1)):
        other, replay = (together(run, Part(size, None, steps, name)) for size, name in ((4, backend), (0, "cpu")))
        assert other.records == replay.records, f"{backend}: {differing(other, replay)}"
    yield "equal: other backends"
    yield from sevens()
    yield from void()


def sevens() -> Iterator[str]:
    """From seven replicas on the two residuals are two trees."""
    found = []
    for residual in ("ascending_level", "left_fold"):
        run = spec(ordered(7, 1, residual))  # type: ignore[arg-type]
        ranks, replay = together(run, Part(7, None, 2)), together(run, Part(0, None, 2))
        assert ranks.records == replay.records, residual
        found.append(replay.records[0]["gradient"])
    assert found[0] != found[1]
    yield "equal: seven replicas by both residuals, each of which has its own bits"


def void() -> Iterator[str]:
    """A value that is not finite in one rank's rows."""
    run, spoiled = spec(ordered(2, 2)), ("head", 1400, NAN)
    replay = together(run, Part(0, None, 2, plant=spoiled))
    assert replay.records[0]["event"] == "nonfinite" and replay.records[0]["gradient"] is None
    assert together(run, Part(4, None, 2, plant=spoiled)).records == replay.records
    yield "equal where a value is not finite: the step is void on every rank"


def main() -> None:
    """Print the report; exit with an error where anything differs."""
    for text in check():
        print(text, flush=True)


if __name__ == "__main__":
    main()
