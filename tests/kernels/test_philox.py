"""Philox4x32-10 against Random123's known answers, and words as a function of their index alone."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference import philox

PI = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0))
ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([ONES] * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (*PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: tuple[int, int], answer: str) -> None:
    block = philox.philox(np.array([counter], np.uint32), key)[0]
    assert " ".join(f"{int(word):08x}" for word in block) == answer


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same function in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


def test_a_batch_of_counters_is_each_counter_alone() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint32)
    key = (0x12345678, 0xFEDCBA98)
    expected = [plain_philox(counter.tolist(), list(key)) for counter in counters]
    assert philox.philox(counters, key).tolist() == expected


def test_word_i_is_element_i_mod_4_of_block_i_div_4() -> None:
    seed, first = 0x0123456789ABCDEF, 4 * 2**32 - 6  # crosses the low counter word
    tag = philox.purpose_words("weights/head")
    got = philox.words(seed, "weights/head", first, 11)
    for i, word in enumerate(got.tolist(), first):
        counter = [(i // 4) & ONES, i // 4 >> 32, *tag]
        assert word == plain_philox(counter, [seed & ONES, seed >> 32])[i % 4]


def test_pieces_and_chunks_change_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = philox.words(42, "a", 0, 1000)
    for first, count in ((0, 0), (0, 1), (1, 7), (3, 997), (999, 1)):
        assert philox.words(42, "a", first, count).tobytes() == whole[first : first + count].tobytes()
    monkeypatch.setattr(philox, "CHUNK_BLOCKS", 3)
    assert philox.words(42, "a", 2, 998).tobytes() == whole[2:].tobytes()


def test_seed_and_purpose_matter() -> None:
    draws = {philox.words(seed, name, 0, 8).tobytes() for seed in (0, 1, 2**32, 2**63) for name in ("a", "b", "")}
    assert len(draws) == 12


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="seed is -1"):
        philox.words(-1, "a", 0, 1)
    with pytest.raises(ValueError, match="do not exist"):
        philox.words(0, "a", -1, 1)
    with pytest.raises(ValueError, match="do not exist"):
        philox.words(0, "a", 2**63, 1)
