"""Curves as SVG, with nothing but numbers: no script, no font, no link; the same bytes from the same figures.

A long line is drawn by spans of steps: the mean as a line, the least and the greatest as a band around it, so that no
spike gets lost. The drawing is as narrow as a phone, so that its letters can be read there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 200, 52, 22, 8, 8  # in SVG's units
SPANS = 300  # points of a line at most
WIDE = 20.0  # values that differ by more than this factor are drawn by their logarithms


@dataclass(frozen=True)
class Span:
    """Some values in a row: their middle place on the axis of steps, least, mean and greatest."""

    step: float
    low: float
    mean: float
    high: float


@dataclass(frozen=True)
class Chart:
    """What one drawing shows. lines: each in parts, with gaps between them; dots, flags: value at a step.

    levels: values with a name, drawn as a line across. unit: as the axis is read aloud.
    """

    title: str
    unit: str
    last: int
    lines: list[list[Span]]
    dots: Mapping[int, float] = field(default_factory=dict)
    flags: Mapping[int, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)


def span_size(steps: int) -> int:
    """Of how many steps a point of a line is the mean."""
    return max(1, -(-steps // SPANS))


def spans(values: np.ndarray, first: float = 0.0) -> list[list[Span]]:
    """values, f64[N], NaN where there is none, as parts of at most SPANS spans in all; a span without any is a gap.

    first: place of the first value on the axis of steps.
    """
    size = span_size(len(values))
    parts: list[list[Span]] = [[]]
    for start in range(0, len(values), size):
        some = values[start : start + size]
        finite = some[np.isfinite(some)]
        if len(finite):
            place = first + start + (len(some) - 1) / 2
            mean = math.fsum(finite.tolist()) / len(finite)
            parts[-1].append(Span(place, float(finite.min()), mean, float(finite.max())))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def band(steps: Sequence[int], values: np.ndarray) -> list[list[Span]]:
    """values, f64[D, T] of D steps and T tensors, as spans from the least tensor to the greatest around the median."""
    part = []
    for step, row in zip(steps, values, strict=True):
        finite = row[np.isfinite(row)]
        if len(finite):
            part.append(Span(step, float(finite.min()), float(np.median(finite)), float(finite.max())))
    return [part] if part else []


def drawn(chart: Chart) -> str:
    """An <svg> of the chart; "" where there is nothing to draw."""
    shown = [value for part in chart.lines for span in part for value in (span.low, span.high)]
    shown += [*chart.dots.values(), *chart.flags.values()]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = _Scale.of(low, high, max(chart.last, 1))
    levels = {name: value for name, value in chart.levels.items() if scale.low <= value <= scale.high}
    inner = [*_axes(scale), *(_level(scale, name, value) for name, value in levels.items())]
    for part in chart.lines:
        inner += [_band(scale, part), _line(scale, part)]
    inner += [f'<circle class="dot" cx="{scale.x(k):.1f}" cy="{scale.y(v):.1f}" r="3"/>' for k, v in chart.dots.items()]
    inner += [_flag(scale, step, value) for step, value in chart.flags.items()]
    said = f"{chart.title}: {chart.unit}, between {short(low)} and {short(high)}, over {chart.last:,} steps"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}">{"".join(inner)}</svg>'


def loss_curve(losses: Sequence[float | None] | np.ndarray, held_out: Mapping[int, float | None]) -> str:
    """The losses of steps in nats as a line, None or NaN where there is none, and held-out losses of states as dots."""
    dots = {step: loss for step, loss in held_out.items() if loss is not None}
    return drawn(Chart("Loss", "nats a token", max(len(losses), *dots, 1), spans(np.array(losses, np.float64)), dots))


def alone(svg: str) -> str:
    """A drawing as a file of its own, with the style that a page gives it elsewhere; "" for none."""
    style = (
        "<style>text{fill:#888;font:11px sans-serif}.grid{stroke:#8886}.line{fill:none;stroke:#2563c9;stroke-width:1.5}"
    )
    style += ".band,.only{fill:#2563c9}.band{opacity:.25}.dot{fill:#c2410c}</style>"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{2 * HEIGHT}"'
    return svg.replace("<svg ", f"<svg {size} ", 1).replace(">", f">{style}", 1)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    last: int
    log: bool

    @classmethod
    def of(cls, low: float, high: float, last: int) -> "_Scale":
        if low > 0 and high / low > WIDE:
            return cls(low / 1.1, high * 1.2, last, True)
        room = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room, last, False)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step / self.last, 1.0)

    def y(self, value: float) -> float:
        ends = self.low, self.high, value
        low, high, at = map(math.log, ends) if self.log else ends
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - at) / (high - low)

    def ticks(self) -> list[float]:
        """At most seven round values on the axis."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            inside = [value for value in found if self.low <= value <= self.high]
            return inside[:: max(1, -(-len(inside) // 7))]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        every = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
        first, end = math.ceil(self.low / every), math.floor(self.high / every)
        return [number * every for number in range(first, end + 1)]


def short(value: float) -> str:
    """Four digits of a value: 0.0123, 12.35, 8.1e-05."""
    return f"{value:.4g}"


def _axes(scale: _Scale) -> Iterator[str]:
    for value in scale.ticks():
        y = scale.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>'
    for step, anchor, x in ((0, "start", LEFT), (scale.last, "end", WIDTH - RIGHT)):
        yield f'<text x="{x}" y="{HEIGHT - 5}" text-anchor="{anchor}">step {step:,}</text>'


def _level(scale: _Scale, name: str, value: float) -> str:
    y = scale.y(value)
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{WIDTH - RIGHT}" y="{y - 3:.1f}" text-anchor="end">{name}</text>'
    )


def _line(scale: _Scale, part: list[Span]) -> str:
    if len(part) == 1:
        return f'<circle class="only" cx="{scale.x(part[0].step):.1f}" cy="{scale.y(part[0].mean):.1f}" r="2"/>'
    return f'<polyline class="line" points="{_points(scale, [(s.step, s.mean) for s in part])}"/>'


def _band(scale: _Scale, part: list[Span]) -> str:
    if all(span.low == span.high for span in part):
        return ""
    around = [(s.step, s.high) for s in part] + [(s.step, s.low) for s in reversed(part)]
    return f'<polygon class="band" points="{_points(scale, around)}"/>'


def _flag(scale: _Scale, step: int, value: float) -> str:
    x, y = scale.x(step), scale.y(value)
    return f'<path class="flag" d="M{x:.1f} {y:.1f}l-3.5 -6h7z"/>'


def _points(scale: _Scale, pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in pairs)
