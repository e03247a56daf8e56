"""A loss curve as SVG, with nothing but numbers: no script, no font, no link; the same bytes from the same losses."""

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 300, 48, 32, 12, 12  # in SVG's units
SPANS = 480  # points of a line at most: a longer run is drawn by the means of so many spans of steps

Point = tuple[float, float]


def loss_curve(losses: Sequence[float | None], held_out: Mapping[int, float | None]) -> str:
    """An <svg> of the steps' losses as a line and of the held-out losses by state as dots, in nats; "" without any.

    None, for a step that was not finite, is a gap.
    """
    dots = {step: loss for step, loss in held_out.items() if loss is not None}
    known = [loss for loss in losses if loss is not None] + list(dots.values())
    if not known:
        return ""
    low, high = math.floor(min(known)), max(math.ceil(max(known)), math.floor(min(known)) + 1)
    last = max(len(losses), *dots, 1)

    def place(step: float, loss: float) -> Point:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    lines = [[place(step, loss) for step, loss in part] for part in _parts(losses)]
    paths = "".join(f'<polyline class="train" points="{" ".join(map(_shown, line))}"/>' for line in lines)
    marks = "".join(_dot(place(step, loss)) for step, loss in sorted(dots.items()))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="curve-title">'
        f'<title id="curve-title">Loss in nats over {len(losses)} steps, between {low} and {high}</title>'
        f"{_axes(low, high, last)}{paths}{marks}</svg>"
    )


def alone(svg: str) -> str:
    """The curve as a file of its own, with the style that a page gives it elsewhere; "" for none."""
    style = "<style>text{fill:#888;font:12px sans-serif}.grid{stroke:#8886}"
    style += ".train{fill:none;stroke:#2563c9;stroke-width:2}.held-out{fill:#c2410c}</style>"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
    return svg.replace("<svg ", f"<svg {size} ", 1).replace(">", f">{style}", 1)


def _parts(losses: Sequence[float | None]) -> list[list[Point]]:
    """(step, loss) of the line, cut where a span has no finite loss."""
    size = max(1, -(-len(losses) // SPANS))
    parts: list[list[Point]] = [[]]
    for start in range(0, len(losses), size):
        finite = [loss for loss in losses[start : start + size] if loss is not None]
        if finite:
            parts[-1].append((start + (size + 1) / 2, math.fsum(finite) / len(finite)))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def _axes(low: int, high: int, last: int) -> str:
    """A line and a number at each of a few whole losses, and the first and last step."""
    every = max(1, -(-(high - low) // 6))
    marks = []
    for loss in range(low, high + 1, every):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for step, anchor, x in ((0, "start", LEFT), (last, "end", WIDTH - RIGHT)):
        marks.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">step {step:,}</text>')
    return "".join(marks)


def _shown(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"


def _dot(point: Point) -> str:
    return f'<circle class="held-out" cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="4"/>'
