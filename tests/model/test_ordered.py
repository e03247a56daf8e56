"""The replay of the ordered reduction: which tree it builds, how much it holds, and that every order counts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import get_args

import numpy as np
import pytest

from model import ordered
from model.ordered import Order, Residual, TreeFold, blocks, reciprocal, replay
from tests.model import wide

LEVELS: Residual = "ascending_level"
LEFT: Residual = "left_fold"


def tree(monkeypatch: pytest.MonkeyPatch, count: int, residual: Residual) -> str:
    """The additions of a fold, written out."""
    with monkeypatch.context() as patch:
        patch.setattr(ordered, "float_add", lambda lower, higher: f"({lower}+{higher})")
        fold = TreeFold(count, residual)
        for replica in range(count):
            fold.push(str(replica))  # type: ignore[arg-type]
        return str(fold.result())


def test_trees_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    four, both = "((0+1)+(2+3))", get_args(Residual)
    expected = {1: "0", 2: "(0+1)", 3: "((0+1)+2)", 4: four, 5: f"({four}+4)", 6: f"({four}+(4+5))"}
    expected |= {8: f"({four}+((4+5)+(6+7)))", 9: f"(({four}+((4+5)+(6+7)))+8)"}
    for count, text in expected.items():
        assert {tree(monkeypatch, count, residual) for residual in both} == {text}
    assert tree(monkeypatch, 7, LEVELS) == f"({four}+((4+5)+6))"
    assert tree(monkeypatch, 7, LEFT) == f"(({four}+(4+5))+6)"


def test_the_two_residuals_part_where_there_are_three_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    differ = [n for n in range(1, 49) if tree(monkeypatch, n, LEVELS) != tree(monkeypatch, n, LEFT)]
    assert differ == [n for n in range(1, 49) if n.bit_count() >= 3]
    assert differ[:3] == [7, 11, 13]


@pytest.mark.parametrize("replicas", range(1, 14))
def test_their_bits_differ_at_seven_and_agree_below(replicas: int) -> None:
    found = [replay(Order(replicas, 2, 1, residual), wide.gradient).tobytes() for residual in (LEVELS, LEFT)]
    assert len(set(found)) == (2 if replicas in (7, 11, 13) else 1)


def by_hand(order: Order) -> np.ndarray:
    """The same reduction as an expression over all parts at once: no fold, and nothing in place."""
    micro, shard, replica = (np.float32(1) / np.float32(n) for n in (order.micro_batches, order.shards, order.replicas))
    ranks = [reduce(np.add, [g * micro for g in own]) for own in wide.gradients(order)]
    nodes = [reduce(np.add, ranks[r * order.shards :][: order.shards]) * shard for r in range(order.replicas)]
    return (levels if order.residual == LEVELS else left)(nodes) * replica


def levels(parts: list[np.ndarray]) -> np.ndarray:
    """Split at the largest power of two below their number."""
    if len(parts) == 1:
        return parts[0]
    cut = 1 << (len(parts) - 1).bit_length() - 1
    return levels(parts[:cut]) + levels(parts[cut:])


def left(parts: list[np.ndarray]) -> np.ndarray:
    return reduce(np.add, [levels(parts[block.start : block.stop]) for block in blocks(len(parts))])


@pytest.mark.parametrize("residual", get_args(Residual))
def test_replay_is_the_expression(residual: Residual) -> None:
    for replicas in range(1, 17):
        for shards in (1, 3, 8):
            order = Order(replicas, shards, 1 + replicas % 3, residual)
            found = replay(order, wide.gradient)
            assert found.dtype == np.float32
            assert found.tobytes() == by_hand(order).tobytes(), order


def test_calls_are_in_mesh_order() -> None:
    calls: list[tuple[int, int]] = []

    def watched(rank: int, micro_batch: int) -> np.ndarray:
        calls.append((rank, micro_batch))
        return wide.gradient(rank, micro_batch)

    replay(Order(3, 4, 2, LEFT), watched)
    assert calls == [(rank, index) for rank in range(12) for index in range(2)]


@pytest.mark.parametrize(
    "moved",
    [
        pytest.param(lambda replica, shard, index: (replica, 2 - shard, index), id="shards descending"),
        pytest.param(lambda replica, shard, index: ((replica + 1) % 6, shard, index), id="replicas rotated"),
        pytest.param(lambda replica, shard, index: (replica, shard, 2 - index), id="micro-batches descending"),
        pytest.param(lambda r, s, index: (*divmod(s * 6 + r, 3), index), id="shard-major"),
    ],
)
def test_another_order_gives_other_bits(moved: Callable[[int, int, int], tuple[int, int, int]]) -> None:
    order = Order(6, 3, 3, LEFT)

    def other(rank: int, index: int) -> np.ndarray:
        replica, shard, place = moved(*divmod(rank, 3), index)
        return wide.gradient(order.rank(replica, shard), place)

    assert replay(order, other).tobytes() != replay(order, wide.gradient).tobytes()


def test_another_shape_of_the_same_ranks_gives_other_bits() -> None:
    """But 6 nodes of 2 ranks and 12 of one build the same tree, and halving is exact."""
    shapes = [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    found = [replay(Order(*shape, 1, LEFT), wide.gradient).tobytes() for shape in shapes]
    assert len(set(found)) == 5 and found[4] == found[5]


@pytest.mark.parametrize("count", range(1, 66))
def test_accumulators_alive(count: int) -> None:
    """Counted from outside, by weak references, whenever a further part has just been made."""
    alive: set[int] = set()
    fold, peak = TreeFold(count, LEFT), 0

    def part(replica: int) -> np.ndarray:
        made = np.ones(1, np.float32)
        alive.add(replica)
        weakref.finalize(made, alive.discard, replica)
        return made

    for replica in range(count):
        made = part(replica)
        peak = max(peak, len(alive))
        fold.push(made)
        del made
        assert len(alive) == (replica + 1).bit_count()
    assert peak <= fold.limit == int(np.ceil(np.log2(count))) + 1
    assert peak == fold.limit or count.bit_count() > 1  # reached at each power of two: at 8, four
    assert fold.result()[0] == count
    assert not alive or len(alive) == 1


def test_too_many_accumulators_are_noticed() -> None:
    fold = TreeFold(8, LEFT)
    fold.limit = 3
    for _ in range(7):
        fold.push(np.ones(1, np.float32))
    with pytest.raises(AssertionError, match="4 accumulators are alive in a fold over 8, not 3"):
        fold.push(np.ones(1, np.float32))


def test_reciprocals_are_rounded_once_and_are_not_divisions() -> None:
    for count in range(1, 2049):
        found, exact = reciprocal(count), Fraction(1, count)
        neighbours = [np.nextafter(found, np.float32(side)) for side in (0, 2)]
        errors = [abs(Fraction(float(x)) - exact) for x in (found, *neighbours)]
        assert found.dtype == np.float32 and errors[0] < min(errors[1:])
    values = np.random.default_rng(1).uniform(1, 2, 10_000).astype(np.float32)
    share = {n: np.mean(ordered.times_reciprocal(values.copy(), n) != values / np.float32(n)) for n in (2, 3, 6, 8)}
    assert share[2] == share[8] == 0
    assert share[3] > 0.2 and share[6] > 0.2


def test_all_three_averages_are_taken() -> None:
    """Each part's size shows in the result: 1/3 of micro-batches, 1/5 of shards, 1/7 of replicas, each rounded."""
    ones = np.ones(2, np.float32)
    third, fifth, seventh = (np.float32(1) / np.float32(n) for n in (3, 5, 7))
    for (replicas, shards, micro), expected in {
        (1, 1, 3): (third + third) + third,
        (1, 5, 1): np.float32(5) * fifth,
        (7, 1, 1): np.float32(7) * seventh,
    }.items():
        found = replay(Order(replicas, shards, micro, LEVELS), lambda rank, index: ones)
        assert found.tobytes() == np.full(2, expected, np.float32).tobytes()
    assert ones.tolist() == [1, 1]


def test_negative_zero_and_subnormals_stay() -> None:
    tiny = np.array([-0.0, 3e-45, -1e-40], np.float32)
    assert replay(Order(1, 1, 1, LEFT), lambda rank, index: tiny).tobytes() == tiny.tobytes()
    assert replay(Order(4, 2, 2, LEFT), lambda rank, index: tiny)[0].tobytes() == tiny[0].tobytes()


def test_gradients_are_not_written() -> None:
    order = Order(3, 2, 2, LEFT)
    given = {(rank, index): wide.gradient(rank, index).copy() for rank in range(6) for index in range(2)}
    replay(order, lambda rank, index: given[rank, index])
    assert all(array.tobytes() == wide.gradient(*key).tobytes() for key, array in given.items())


def test_errors() -> None:
    one, fold = np.ones(2, np.float32), TreeFold(2, LEFT)
    with pytest.raises(ValueError, match="shards = 0; at least 1"):
        Order(1, 0, 1, LEFT)
    with pytest.raises(ValueError, match="'right'; it is one of ascending_level, left_fold"):
        Order(1, 1, 1, "right")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="adds float32, and was given float64"):
        replay(Order(1, 1, 1, LEFT), lambda rank, index: np.ones(2))
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[1\]"):
        ordered.float_add(one.copy(), one[:1])
    for count in (0, 1, 3):
        with pytest.raises(ValueError, match=f"of 2 parts was given {count}"):
            ordered.ascending_sum([one] * count, 2)
    fold.push(one.copy())
    with pytest.raises(ValueError, match="over 2 replicas was given 1"):
        fold.result()
    fold.push(one.copy())
    with pytest.raises(ValueError, match="over 2 replicas was given one more"):
        fold.push(one.copy())
