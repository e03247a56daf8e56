"""Curves: the right way up, gaps where there is no value, spikes of long runs kept."""

from xml.etree import ElementTree

import numpy as np
import pytest

from storage.page.curves import SPANS, Chart, band, drawn, spans

NAN = float("nan")


def svg(values: list[float], **more: object) -> str:
    return drawn(Chart("Loss", "nats", len(values), spans(np.array(values, np.float64)), **more))  # type: ignore[arg-type]


def points(drawing: str, kind: str = "polyline") -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(drawing)
    lines = [line.attrib["points"].split() for line in root.iter(kind)]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line)] for line in lines]


def test_a_curve_goes_down_where_the_loss_does() -> None:
    (line,) = points(svg([5.0, 4.0, 3.0, 2.5], dots={0: 5.0, 4: 2.4}))
    assert [x for x, _ in line] == sorted(x for x, _ in line) and [y for _, y in line] == sorted(y for _, y in line)
    assert len(line) == 4


def test_a_step_without_a_value_is_a_gap() -> None:
    assert [len(line) for line in points(svg([5.0, 4.0, NAN, NAN, 3.0, 2.0]))] == [2, 2]
    assert svg([NAN]) == "" == svg([])


@pytest.mark.parametrize("steps", [1, 2, SPANS - 1, SPANS, SPANS + 1, 80_957])
def test_a_long_curve_is_drawn_by_means_within_least_and_greatest(steps: int) -> None:
    values = [3.0 + 1 / (step + 1) for step in range(steps)]
    values[steps // 2] = 9.0
    drawing = svg(values)
    assert len(drawing) < 30_000
    line = [point for part in points(drawing) for point in part]
    assert len(line) <= SPANS and all(0 <= x <= 360 and 0 <= y <= 200 for x, y in line)
    if steps > SPANS:  # the one step out of line is in the band, though no mean shows it
        (around,) = points(drawing, "polygon")
        assert min(y for _, y in around) < min(y for _, y in line) - 10


def test_values_far_apart_are_drawn_by_logarithms() -> None:
    ((_, first), (_, second), (_, third)) = points(svg([0.1, 1.0, 10.0]))[0]
    assert first - second == pytest.approx(second - third, abs=0.11)


def test_a_band_of_tensors_leaves_out_what_was_not_measured() -> None:
    ((one, two),) = band([0, 10], np.array([[1.0, 2.0, NAN], [3.0, 5.0, 4.0]]))
    assert (one.low, one.mean, one.high) == (1.0, 1.5, 2.0) and (two.low, two.mean, two.high) == (3.0, 4.0, 5.0)
    assert band([0], np.array([[NAN]])) == []
