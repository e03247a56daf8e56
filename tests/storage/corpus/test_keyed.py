import itertools

import numpy as np
import pytest

from storage.corpus.keyed import key, permute, restore

MASK = 2**64 - 1


def slow_permute(secret: bytes, n: int, index: int) -> int:
    """The permutation again, in Python integers."""
    from kernels.digest import digest

    expanded = b"".join(bytes.fromhex(digest(secret + bytes([i]), "stream round keys")) for i in range(4))
    round_keys = [int.from_bytes(expanded[8 * i : 8 * i + 8], "little") for i in range(16)]
    half = 1
    while 4**half < n:
        half += 1
    value = index
    while True:
        left, right = value >> half, value % 2**half
        for round_key in round_keys:
            x = right ^ round_key
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
            x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        value = left << half | right
        if value < n:
            return value


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_element_once_and_as_slow_integers_say(n: int) -> None:
    secret = key(3, "test", n)
    found = permute(secret, n, np.arange(n))
    assert sorted(found.tolist()) == list(range(n))
    assert found[:40].tolist() == [slow_permute(secret, n, i) for i in range(min(n, 40))]


def test_any_part_in_any_order() -> None:
    secret = key(3, "test")
    whole = permute(secret, 777, np.arange(777))
    assert permute(secret, 777, np.array([776, 0, 5, 5])).tolist() == whole[[776, 0, 5, 5]].tolist()
    assert permute(secret, 10**15, np.array([10**15 - 1, 0])).max() < 10**15


def test_small_permutations_are_even_handed() -> None:
    """Each of the 24 orders of 4 elements comes up about equally often over many keys."""
    orders = [tuple(permute(key(0, "orders", i), 4, np.arange(4)).tolist()) for i in range(4800)]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert sum((count - 200) ** 2 / 200 for count in counts) < 60  # 23 degrees of freedom: one in 30,000 beyond


def test_neighbours_scatter() -> None:
    found = permute(key(1, "scatter"), 100_000, np.arange(100_000))
    steps = np.abs(np.diff(found))
    assert abs(steps.mean() - 100_000 / 3) < 500
    assert (steps == 1).sum() < 12


def test_purposes_have_keys_of_their_own() -> None:
    assert len({key(1, "a"), key(1, "b"), key(2, "a"), key(1, "a", "b"), key(1, "a", 0), key(1, "a", "0")}) == 6


def test_refusals() -> None:
    with pytest.raises(ValueError, match="0 elements"):
        permute(key(1, "x"), 0, np.arange(0))
    with pytest.raises(IndexError, match="5 is not below 5"):
        permute(key(1, "x"), 5, np.array([5]))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 65, 4097, 10**15])
def test_restore_is_the_inverse(n: int) -> None:
    secret, index = key(3, "test", n), np.arange(min(n, 5000))
    assert restore(secret, n, permute(secret, n, index)).tolist() == index.tolist()
    assert permute(secret, n, restore(secret, n, index)).tolist() == index.tolist()
