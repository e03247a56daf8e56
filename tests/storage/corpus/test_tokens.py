"""The tokenizer: frozen ids for frozen strings, two libraries that agree, special tokens that cannot be injected."""

import json
from pathlib import Path

import numpy as np
import pytest

from storage.corpus.spec import TrainTokenizer
from storage.corpus.tokens import Tokens, train
from storage.errors import InputFault, MachineFault
from storage.store import object_digest
from tests.storage.corpus.mixes import prose

FROZEN = json.loads((Path(__file__).parent / "frozen_ids.json").read_text())
SPEC = TrainTokenizer(vocab=600, sample_bytes=1)
TEXTS = [prose(i, 200) for i in range(60)]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return loaded(train(SPEC, iter(TEXTS)))


def loaded(data: bytes, end_of_text: str = "<|endoftext|>") -> Tokens:
    return Tokens(data, object_digest(data), end_of_text)


def ids(tokens: Tokens, text: str) -> list[int]:
    return tokens.encode([text]).ids.tolist()


def test_frozen_tokenizer(tokens: Tokens) -> None:
    assert tokens.digest == FROZEN["digest"]
    assert (tokens.eot, tokens.vocab, tokens.dtype) == (0, 600, np.dtype("<u2"))


def test_frozen_ids(tokens: Tokens) -> None:
    assert {text: ids(tokens, text) for text in FROZEN["ids"]} == FROZEN["ids"]


def test_both_libraries_agree_on_every_frozen_string(tokens: Tokens) -> None:
    for text in [*FROZEN["ids"], *TEXTS]:
        tokens.check(text, tokens.encode([text]).ids)
    with pytest.raises(MachineFault, match="disagree at token 1"):
        tokens.check("a b", np.array([ids(tokens, "a b")[0], 5, 0]))


def test_training_does_not_depend_on_the_order_of_texts(tokens: Tokens) -> None:
    assert train(SPEC, iter(TEXTS[::-1])) == tokens.data


def test_one_end_after_every_text_and_none_before(tokens: Tokens) -> None:
    encoded = tokens.encode(["a", "b", "c"])
    a, b, c = (tokens.encode([text]).ids[0] for text in "abc")
    assert encoded.ids.tolist() == [a, 0, b, 0, c, 0]
    assert encoded.ends.tolist() == [2, 4, 6] and encoded.lengths.tolist() == [2, 2, 2]
    assert (tokens.encode(TEXTS).ids == 0).sum() == len(TEXTS)


def test_batches_change_nothing(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tokens.encode(TEXTS)
    monkeypatch.setattr("storage.corpus.tokens.BATCH_BYTES", 1)
    one_by_one = tokens.encode(TEXTS)
    assert np.array_equal(whole.ids, one_by_one.ids) and np.array_equal(whole.ends, one_by_one.ends)
    assert np.array_equal(whole.text_ids(3), tokens.encode([TEXTS[3]]).ids)
    assert tokens.encode([]).ids.size == 0


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endoftext|>b", " <|endoftext|>\n<|endoftext|><|endoftext|>"])
def test_a_special_token_in_a_text_is_text(tokens: Tokens, text: str) -> None:
    assert ids(tokens, text).count(0) == 1
    assert ids(tokens, text)[-1] == 0
    tokens.check(text, tokens.encode([text]).ids)


def test_a_large_vocabulary_is_never_wrapped() -> None:
    base = json.loads(train(TrainTokenizer(vocab=257, sample_bytes=1), iter(["x"])))
    base["model"]["vocab"] |= {f"Ġunused{i}": 257 + i for i in range(70_000)}
    wide = loaded(json.dumps(base).encode())
    assert wide.dtype == np.dtype("<u4") and wide.encode(["x"]).ids.dtype == np.dtype("<u4")


def test_a_changed_tokenizer_is_refused(tokens: Tokens) -> None:
    with pytest.raises(InputFault) as error:
        Tokens(tokens.data.replace(b"1.0", b"1.1", 1), tokens.digest, "<|endoftext|>")
    assert tokens.digest in error.value.message
    with pytest.raises(InputFault, match="cannot be loaded"):
        loaded(b"{}")
    with pytest.raises(InputFault, match="no token '<s>'"):
        loaded(tokens.data, "<s>")


def test_too_little_text_for_the_vocabulary() -> None:
    with pytest.raises(InputFault, match="gives 257 ids, the recipe asks for 600"):
        train(SPEC, iter(["abc"]))
