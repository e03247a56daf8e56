"""The page's account of the run itself: its curves, events, segments, chain, checkpoints and recipe."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from storage import checkpoint
from storage.page.curves import Chart, band, drawn, loss_curve, short, span_size, spans
from storage.page.history import Diagnosed, History
from storage.page.markup import Place, code, count, facts, moment, more, name, section, shortened, table, text
from storage.page.steps import EVENTS
from storage.release import RELEASE_KEY
from storage.segment import Segment

MEANT = {  # how a segment ended
    "finished": "finished the run",
    "paused": "paused as planned",
    "stopped": "was stopped",
    "halted": "halted by the spike protocol",
    "diverged": "found another entry than recorded",
    "failed": "failed",
}


class Figure(NamedTuple):
    """A chart, "" where there is nothing to draw, and what it shows in words."""

    title: str
    svg: str
    said: str


def curves(history: History) -> str:
    """Loss, gradient norm, and what was measured of weights and quantisers."""
    found = [_loss(history), _norms(history), *_measured(history.diagnosed, len(history.ledger))]
    shown = "".join(map(_figure, found))
    return section(
        "curves", "Curves", f'<div class="charts">{shown}</div>' if shown else "", _tensors(history.diagnosed)
    )


def _figure(figure: Figure) -> str:
    title, svg, said = figure
    return f"<figure><figcaption><h3>{title}</h3></figcaption>{svg}<p>{said}</p></figure>" if svg else ""


def _loss(history: History) -> Figure:
    dots = {step: loss for step, loss in history.held_out.items() if loss is not None}
    losses = history.losses
    said = ["Nats a token."]
    if len(losses) and np.isfinite(losses[-1]):
        said.append(f"{losses[-1]:.3f} in the last step (line).")
    if dots:
        said.append(f"{list(dots.values())[-1]:.3f} on windows that no step saw (dots), after {max(dots):,} steps.")
    return Figure("Loss", loss_curve(losses, dots), " ".join(said) + _spread(losses))


def _norms(history: History) -> Figure:
    norms, spec = history.norms, history.spec
    events = [entry for entry in history.ledger if entry.event == "spike"]
    flags = {entry.step: norms[entry.step] for entry in events if np.isfinite(norms[entry.step])}
    levels = {"clipped above": float(spec.optimizer.clip_norm), "spike": float(spec.spike.norm)}
    chart = Chart("Gradient norm", "before clipping", len(norms), spans(norms), {}, flags, levels)
    clipped = sum(entry.clipped for entry in history.ledger)
    said = f"Before clipping; {count(clipped, 'step was', 'steps were')} clipped to {text(spec.optimizer.clip_norm)}."
    marked = f" {count(len(flags), 'spike')} (triangles)." if flags else ""
    return Figure("Gradient norm", drawn(chart), said + marked + _spread(norms))


def _spread(values: np.ndarray) -> str:
    size = span_size(len(values))
    return f" Means of {size:,} steps, within their least and greatest." if size > 1 else ""


def _measured(found: Diagnosed, steps: int) -> Iterator[Figure]:
    for title, unit, values in (
        ("Weight norms", "a tensor's norm by its first one", _relative(found.weight_norm)),
        (
            "Quantiser drift",
            "a tensor's largest quantiser step by its first recorded one",
            _relative(found.largest_step),
        ),
        ("Codes at the rim", "the share of a tensor's codes that are ±127", found.rim),
    ):
        tensors = count(int(np.isfinite(values).any(axis=0).sum()), "tensor")
        said = f"{unit.capitalize()}: the median of {tensors}, within the least and greatest."
        yield Figure(title, drawn(Chart(title, unit, steps, band(found.steps, values))), said)


def _relative(values: np.ndarray) -> np.ndarray:
    """f64[D, T] by the first row; NaN for a tensor that began at zero or was not measured then."""
    first = values[:1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(first > 0, values / first, np.nan)


def _tensors(found: Diagnosed) -> str:
    if not found.steps:
        return ""
    heads = ("Tensor", "Weight norm, first", "last", "Largest step, first", "last", "Codes at the rim, last")
    norms, largest = found.weight_norm, found.largest_step
    columns = norms[0], norms[-1], largest[0], largest[-1], found.rim[-1]
    rows = [
        (code(tensor), *("" if np.isnan(v) else short(v) for v in (column[i] for column in columns)))
        for i, tensor in enumerate(found.names)
    ]
    title = f"{count(len(rows), 'tensor')}, at steps {found.steps[0]:,} and {found.steps[-1]:,}"
    return more(title, table(heads, rows, (1, 2, 3, 4, 5)))


def events(history: History) -> str:
    """Steps whose update was skipped, and the segments in which the run was made."""
    groups = [list(group) for _, group in groupby(history.ledger, key=lambda entry: entry.event)]
    odd = [(group[0].step, group[-1].step, group[0].event) for group in groups if group[0].event]
    rows = [
        (f"{left:,} more", "", "") if left else (_between(first, last), text(event), EVENTS[event].split(": ")[1])
        for (first, last, event), left in shortened(odd)
    ]
    skipped = table(("Step", "Event", "What happened"), rows) if rows else "<p>No update was skipped.</p>"
    return section("events", "Events", skipped, _segments(history.segments))


def _segments(segments: Sequence[Segment]) -> str:
    rows = [(f"{left:,} more", *[""] * 5) if left else _segment(segment) for segment, left in shortened(segments)]
    heads = ("Begun", "Steps", "Repeated", "How it ended", "Where", "Processes")
    what = "<h3>Segments</h3><p>What really ran, as the trainer says. A restart repeats steps and compares them.</p>"
    return what + table(heads, rows, (5,)) if rows else ""


def _segment(segment: Segment) -> tuple[str, ...]:
    start, end = segment.start, segment.end
    where = f"{text(start.provenance.backend)}, {name(start.provenance.device)}"
    if end is None:
        ran, repeated, ended = f"{start.first_step:,} to ?", "", "no end was recorded: killed, or it ran on"
    else:
        ran = _between(end.first_step, end.last_step - 1) if end.last_step > end.first_step else "none"
        repeated = _between(end.first_step, end.first_step + end.validated_steps - 1) if end.validated_steps else "none"
        ended = MEANT[end.outcome] + (f": {text(end.reason[:300])}" if end.reason else "")
    return moment(start.time), ran, repeated, ended, where, f"{start.processes:,}"


def _between(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def chain(history: History, place: Place, seen: Sequence[str], made: str) -> str:
    """What the chain is, and who checked what of it. seen: who saw which head; made: by whom this page was."""
    ledger, header = history.ledger, history.ledger.header
    same = "as declared when the run began" if place.code == header.code else f"the run began with {code(header.code)}"
    links = (
        f"{count(len(ledger), 'entry', 'entries')}, each holding the digest of the one before, from the run id to the "
        f"head: verified by the program that made this page, {made}. What the entries say, only replays verify."
    )
    signed = "its signature by the trainer's key was verified" if place.signed else "signed after this page was made"
    pairs = {
        "Run id": code(ledger.run_id),
        "Ledger head": code(ledger.head),
        "Chain": links,
        "Head seen by others": "; ".join(seen) or "nobody whose statement is here",
        "Release": f"{place.link(RELEASE_KEY)} lists every object with its digest: {signed}"
        if RELEASE_KEY in place.sizes
        else "this is not a finished publication",
        "Trajectory root": code(ledger.trajectory_root()),
        "Mix root": code(header.mix_root),
        "Initial state": code(header.initial_root),
        "Trainer's key": code(header.trainer),
        "Code": f"{code(place.code)}, {same}" if place.code else code(header.code),
    }
    return section("chain", "Chain", facts(pairs))


def checkpoints(history: History, place: Place) -> str:
    """The states that were published, with their roots."""
    rows = []
    for step, left in shortened(history.states):
        state = place.link(checkpoint.checkpoint_key(step), f"after {step:,} steps")
        rows.append((f"{left:,} more", "") if left else (state, code(history.ledger.state_root(step))))
    return section("checkpoints", "Checkpoints", table(("State", "Its root"), rows) if rows else "")


def recipe(history: History, place: Place) -> str:
    """What the run was begun with; what its id binds is the spec in the ledger's header."""
    if not history.recipe:
        return ""
    why = (
        f"<p>{place.link('recipe.yaml')} as the run was begun with it. What the run id binds is the spec in "
        f"{place.link('ledger/header.json')}.</p>"
    )
    lines = history.recipe.count("\n") + 1
    return section("recipe", "Recipe", why, more(count(lines, "line"), f"<pre>{text(history.recipe)}</pre>"))
