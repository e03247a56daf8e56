"""The tokenizer: frozen ids for frozen strings, two libraries that agree, special tokens that cannot be injected."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from storage.corpus import tokens as tokens_module
from storage.corpus.spec import TrainTokenizer
from storage.corpus.tokens import Tokens, train
from storage.errors import InputFault, MachineFault
from storage.store import MemoryStore, object_digest
from tests.storage.corpus.mixes import pin, prepared, prose

ROOT = Path(__file__).resolve().parents[3]
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
    """Other versions gave other ids for numbers and punctuation, silently: 200 awkward strings, alone and together."""
    frozen = FROZEN["ids"]
    assert len(frozen) == 200
    assert {text: ids(tokens, text) for text in frozen} == frozen
    together = tokens.encode(list(frozen))
    assert [together.text_ids(i).tolist() for i in range(200)] == list(frozen.values())


def test_the_defining_library_gives_the_frozen_ids(tokens: Tokens) -> None:
    reference = Tokenizer.from_str(tokens.data.decode())
    reference.encode_special_tokens = True
    for text, expected in FROZEN["ids"].items():
        assert [*reference.encode(text, add_special_tokens=False).ids, 0] == expected, text
        assert reference.decode(expected[:-1], skip_special_tokens=False) == text


def test_libraries_that_disagree_are_found(tokens: Tokens) -> None:
    for text in [*FROZEN["ids"], *TEXTS]:
        tokens.check(text, tokens.encode([text]).ids)
    with pytest.raises(MachineFault, match="disagree at token 1"):
        tokens.check("a b", np.array([ids(tokens, "a b")[0], 5, 0]))


THREADS = """
import json
from tests.storage.corpus.test_tokens import FROZEN, SPEC, TEXTS, loaded, train
tokens = loaded(train(SPEC, iter(TEXTS[::-1])))
encoded = tokens.encode(list(FROZEN["ids"]))
for i, text in enumerate(FROZEN["ids"]):
    tokens.check(text, encoded.text_ids(i))  # by the other library as well
print(json.dumps([tokens.digest, [encoded.text_ids(i).tolist() for i in range(len(encoded.ends))]]))
"""


@pytest.mark.parametrize(
    "environment",
    [{"RAYON_NUM_THREADS": threads} for threads in ("1", "2", "7")] + [{"TOKENIZERS_PARALLELISM": "false"}],
)
def test_threads_and_the_order_of_texts_change_no_id(environment: dict[str, str]) -> None:
    """Trained and encoded in a process of its own, from the same texts in reverse order."""
    command = [sys.executable, "-c", THREADS]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [FROZEN["digest"], list(FROZEN["ids"].values())]


def test_the_lock_and_the_manifest_name_what_gives_ids(tmp_path: Path) -> None:
    """Both libraries are pinned to a version, and the tokenizer's digest is under the mix root."""
    locked = (ROOT / "constraints.txt").read_text().splitlines()
    for library in ("tokenizers", "fastokens"):
        assert f"{library}=={version(library)}" in locked
    store = MemoryStore(str(tmp_path))
    manifest = prepared(tmp_path, store)[1]
    assert manifest.mix.tokenizer.digest == object_digest(store.read("tokenizer.json"))


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


PADDING = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
BEYOND = {"id": 70_000, "content": "<code>", "single_word": False, "lstrip": False, "rstrip": False}
BEYOND |= {"normalized": False, "special": True}


UNFIT: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda file: file.update(truncation=CUT), "cuts texts off after 3 tokens"),
    (lambda file: file.update(padding=PADDING), "fills texts up with padding"),
    (lambda file: file["model"].update(dropout=0.5), "draws at random which merges it skips"),
    (lambda file: file["added_tokens"].append(BEYOND), "gives '<code>' the id 70000, as which the defining library"),
    (lambda file: file["model"]["vocab"].update({"xy": 70_000}), "cannot be loaded"),  # else uint16 for 258 ids
]


@pytest.mark.parametrize(("change", "said"), UNFIT)
def test_a_tokenizer_that_would_change_texts_in_silence(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    """Published files keep how they were used last: both libraries obey, so that no comparison of them finds it."""
    document = json.loads(train(TrainTokenizer(vocab=257, sample_bytes=1), iter(["x"])))
    change(document)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    about = {name: value for name, value in pin(path).items() if name in ("path", "size", "sha256")}
    target = MemoryStore(str(tmp_path))
    with pytest.raises(InputFault) as error:
        prepared(tmp_path, target, tokenizer={"kind": "pinned", **about})
    assert said in error.value.message and target.list() == []


def test_more_text_than_pairs_can_be_counted_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's 32-bit counts wrapped on a large corpus, and "the" was split: it is refused before it can happen."""
    assert tokens_module.MAX_TRAINED == 2**31 - 1
    texts = ["the " * 100, "thé " * 100]
    monkeypatch.setattr(tokens_module, "MAX_TRAINED", 900)
    train(TrainTokenizer(vocab=257, sample_bytes=1), iter(texts))
    monkeypatch.setattr(tokens_module, "MAX_TRAINED", 899)
    with pytest.raises(InputFault, match="has 900 bytes or more, at most 899"):
        train(TrainTokenizer(vocab=257, sample_bytes=1), iter(texts))
    target = MemoryStore(str(tmp_path))
    with pytest.raises(InputFault, match="at most 899"):
        prepared(tmp_path, target)
    assert target.list() == []


def test_too_little_text_for_the_vocabulary() -> None:
    with pytest.raises(InputFault, match="gives 257 ids, the recipe asks for 600"):
        train(SPEC, iter(["abc"]))
