from collections import Counter

import numpy as np
import pytest

from storage.corpus.keyed import key
from storage.corpus.mixture import Mixture, largest_remainder
from storage.errors import UsageError
from tests.storage.corpus.test_keyed import slow_permute

MIXTURE = Mixture(seed=5, names=("a", "b", "c"), windows=(10, 7, 100), counts=(3, 1, 12))


def slow_locate(mixture: Mixture, upto: int) -> list[tuple[int, int, int, int]]:
    """(source, number, pass, position) of the first windows, by walking the stream from its beginning."""
    read = [0] * len(mixture.names)
    result = []
    for i in range(upto):
        block, slot = divmod(i, mixture.block)
        drawn = slow_permute(key(mixture.seed, "block", block), mixture.block, slot)
        source = [s for s, count in enumerate(mixture.counts) for _ in range(count)][drawn]
        number = read[source]
        read[source] += 1
        passed, position = divmod(number, mixture.windows[source])
        if passed:
            secret = key(mixture.seed, "pass", mixture.names[source], passed)
            position = slow_permute(secret, mixture.windows[source], position)
        result.append((source, number, passed, position))
    return result


def rows(mixture: Mixture, index: np.ndarray) -> list[tuple[int, ...]]:
    located = mixture.locate(index)
    return list(
        zip(*(a.tolist() for a in (located.source, located.number, located.passes, located.position)), strict=True)
    )


def test_random_access_equals_a_walk_from_the_start() -> None:
    walked = slow_locate(MIXTURE, 400)
    assert rows(MIXTURE, np.arange(400)) == walked
    scattered = np.random.default_rng(0).permutation(400)
    assert rows(MIXTURE, scattered) == [walked[i] for i in scattered]


def test_every_block_holds_the_counts() -> None:
    source = MIXTURE.locate(np.arange(160)).source.reshape(10, 16)
    assert all(np.bincount(block, minlength=3).tolist() == [3, 1, 12] for block in source)
    assert len({tuple(block.tolist()) for block in source}) == 10  # each block in an order of its own


def test_a_source_is_read_whole_before_it_repeats_and_then_in_another_order() -> None:
    located = MIXTURE.locate(np.arange(16 * 20))
    mine = located.source == 1
    passes = [located.position[mine & (located.passes == p)].tolist() for p in (0, 1)]
    assert passes[0] == list(range(7))
    assert sorted(passes[1]) == passes[0] != passes[1]


def test_begins_pass_is_the_first_window_of_that_pass() -> None:
    located = MIXTURE.locate(np.arange(16 * 40))
    for source in (0, 1, 2):
        for number in (1, 2, 3):
            first = np.nonzero((located.source == source) & (located.passes == number))[0][0]
            assert MIXTURE.begins_pass(source, number) == first


def test_extreme_weights_exhaust_the_small_source_in_a_defined_way() -> None:
    mixture = Mixture(seed=1, names=("tiny", "huge"), windows=(2, 10**9), counts=(1, 9999))
    located = mixture.locate(np.arange(50_000))
    assert Counter(located.source.tolist()) == {0: 5, 1: 49_995}
    assert located.passes[located.source == 0].tolist() == [0, 0, 1, 1, 2]


def test_far_away_windows_cost_nothing() -> None:
    far = 10**15
    assert rows(MIXTURE, np.array([far, far + 1]))[1] == rows(MIXTURE, np.array([far + 1]))[0]


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(UsageError, match="begins at 0"):
        MIXTURE.locate(np.array([-1]))


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1, 1, 1], 10, [4, 3, 3]),
        ([1, 999], 16, [0, 16]),
        ([5, 0, 5], 7, [4, 0, 3]),
        ([10**18, 1], 65536, [65536, 0]),
        ([300, 60, 54, 36], 65536, [43691, 8738, 7864, 5243]),
    ],
)
def test_largest_remainder(weights: list[int], total: int, expected: list[int]) -> None:
    found = largest_remainder(weights, total)
    assert found == expected
    assert sum(found) == total


def test_find_and_in_pass_lead_back_to_every_window() -> None:
    index = np.random.default_rng(0).permutation(16 * 30)
    located = MIXTURE.locate(index)
    for source in (0, 1, 2):
        mine = located.source == source
        assert MIXTURE.find(source, located.number[mine]).tolist() == index[mine].tolist()
        for passed in np.unique(located.passes[mine]).tolist():
            here = mine & (located.passes == passed)
            assert MIXTURE.in_pass(source, located.position[here], passed).tolist() == index[here].tolist()
    assert located.passes.max() >= 3
