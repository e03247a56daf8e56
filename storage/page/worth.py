"""The page's account of what the weights are worth: held-out losses of each source, and scores on tasks."""

from collections.abc import Mapping, Sequence

import numpy as np

from storage import checkpoint, figures
from storage.olmes import Body
from storage.page.curves import Chart, drawn, spans
from storage.page.history import History
from storage.page.markup import Place, begun, name, section, shortened, table, text

FEW = 8  # sources that have a column each


def worth(history: History, place: Place, scores: Sequence[Body], named: Mapping[str, str]) -> str:
    """named: names of keys, by key. "" where nothing was measured."""
    return section("worth", "What it is worth", _held_out(history, place), _scores(scores, place, named))


def _held_out(history: History, place: Place) -> str:
    if not history.probes:
        return ""
    sources = sorted({name for probe in history.probes.values() for name in probe.sources})
    columns = sources if len(sources) <= FEW else []
    rows = [
        (f"{left:,} more", *[""] * (2 + len(columns))) if left else _state(history, place, step, columns)
        for step, left in shortened(sorted(history.probes))
    ]
    heads = ("State", "Its root", "All windows", *map(name, columns))
    what = (
        "<h3>Held-out losses</h3><p>Nats a token on windows that no step saw, of each source: sums of integers, which "
        "<code>verbatim evaluate ADDRESS --step STATE</code> measures again, to the same bits, and certifies.</p>"
    )
    shown = table(heads, rows, tuple(range(2, len(heads))))
    return what + _curves(history, sources) + shown


def _state(history: History, place: Place, step: int, sources: Sequence[str]) -> tuple[str, ...]:
    probe = history.probes[step]
    losses = [probe.sources[source].value() if source in probe.sources else None for source in sources]
    shown = ("" if loss is None else f"{loss:.3f}" for loss in (history.held_out[step], *losses))
    return place.link(figures.probe_key(step), f"after {step:,} steps"), begun(probe.state), *shown


def _curves(history: History, sources: Sequence[str]) -> str:
    """A line for each source, named in words from the top."""
    steps, lines, ends = sorted(history.probes), [], {}
    for source in sources:
        there = {step: history.probes[step].sources.get(source) for step in steps}
        losses = {step: loss for step, each in there.items() if each and (loss := each.value()) is not None}
        if len(losses) > 1:
            values = np.full(max(losses) + 1, np.nan)
            values[list(losses)] = list(losses.values())
            lines += [[span for part in spans(values) for span in part]]
            ends[source] = losses[max(losses)]
    svg = drawn(Chart("Held-out loss by source", "nats a token", max(steps, default=1), lines))
    order = ", ".join(f"{name(source)} {loss:.3f}" for source, loss in sorted(ends.items(), key=lambda end: -end[1]))
    title = "<figcaption><h3>Held-out loss by source</h3></figcaption>"
    return (
        f'<div class="charts"><figure>{title}{svg}<p>At the end, from above: {order}.</p></figure></div>' if svg else ""
    )


def _scores(scores: Sequence[Body], place: Place, named: Mapping[str, str]) -> str:
    if not scores:
        return ""
    ordered = sorted(scores, key=lambda body: (body.step, body.evaluator, body.tasks, body.canonical()))
    rows = [(f"{left:,} more", *[""] * 4) if left else _score(body, place, named) for body, left in shortened(ordered)]
    what = (
        "<h3>Scores on tasks</h3><p>The share of right answers, each task in the better of two formulations, as "
        "whoever signed them says: they come of sums of floats, and may differ on another machine.</p>"
    )
    return what + table(("State", "Its root", "Tasks", "Mean", "Signed by"), rows, ())


def _score(body: Body, place: Place, named: Mapping[str, str]) -> tuple[str, ...]:
    tasks = [f"{text(task)} {float(score.share()):.1%}" for task, score in sorted(body.scores.items())]
    return (
        place.link(checkpoint.checkpoint_key(body.step), f"after {body.step:,} steps"),
        begun(body.state),
        ", ".join(tasks),
        f"{float(body.mean()):.1%}, {text(body.averaged())}",
        name(named[body.evaluator]) if body.evaluator in named else f"unlisted key {begun(body.evaluator)}",
    )
