"""The map's colours: told apart by readers who see red, green or blue differently, in light and dark.

Simulated by Machado, Oliveira and Fernandes (2009), severity 1; distances are ΔE of CIELAB (1976), in which 2.3 is just
noticeable.
"""

import math
import re
from itertools import combinations

import pytest

from storage.page.make import HERE
from storage.page.steps import MARKS

APART = 12.0
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))

Triple = tuple[float, ...]


def fills(scheme: str, what: str = "fill") -> dict[int, str]:
    light, _, dark = (HERE / "page.css").read_text(encoding="utf-8").partition("@media (prefers-color-scheme: dark)")
    pattern = rf"\.m(\d+) \{{[^}}]*--{what}: (#[0-9a-f]{{3,6}})"
    found = {int(number): colour for number, colour in re.findall(pattern, light)}
    return found if scheme == "light" else found | {int(n): colour for n, colour in re.findall(pattern, dark)}


def linear(colour: str) -> Triple:
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    parts = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)


def times(matrix: tuple[Triple, ...], vector: Triple) -> Triple:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def lab(colour: Triple) -> Triple:
    inside = tuple(min(1.0, max(0.0, c)) for c in colour)
    shares = (a / white for a, white in zip(times(XYZ, inside), (0.9505, 1.0, 1.089), strict=True))
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in shares)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("seen", SEEN)
def test_every_two_marks_are_apart(scheme: str, seen: str) -> None:
    places = {number: lab(times(SEEN[seen], linear(colour))) for number, colour in fills(scheme).items()}
    assert sorted(places) == list(range(len(MARKS)))
    near = min((math.dist(places[a], places[b]), MARKS[a].name, MARKS[b].name) for a, b in combinations(places, 2))
    assert near[0] > APART, near


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_sign_can_be_seen_on_its_colour(scheme: str) -> None:
    inks, found = fills(scheme, "ink"), fills(scheme)
    light = {c: times(XYZ, linear(c))[1] + 0.05 for c in {*inks.values(), *found.values()}}
    for number, mark in enumerate(MARKS):
        low, high = sorted((light[inks[number]], light[found[number]]))
        assert not mark.path or high / low > 3, mark.name
    assert len({mark.path for mark in MARKS}) == len(MARKS)
