"""The tokenizer: trained reproducibly, checked by digest when loaded, and two libraries that must agree.

`tokenizers` trains and defines; `fastokens` encodes, thirty times faster; a sample of every shard is encoded by both.
A special token's name inside a text is text. Training counts sums and breaks ties by ids, so that the order of the
documents and the number of threads play no part.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from fastokens import Tokenizer as FastTokenizer
from tokenizers import Tokenizer as ReferenceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from storage.corpus.parts import Parts
from storage.corpus.spec import TrainTokenizer
from storage.errors import InputFault, MachineFault
from storage.store import object_digest

BATCH_BYTES = 4 << 20
MIN_FREQUENCY = 2
TOKENIZER_PART = "tokenizer"  # the piece of a preparation that has tokenizer.json, {"json": text}
MAX_TRAINED = 2**31 - 1  # bytes: the trainer counts pairs in signed 32 bits and wraps, and a pair needs a byte


@dataclass(frozen=True)
class Encoded:
    """Token ids of texts in order, an end-of-text token after each and none before.

    ids: uint16 or uint32 [all tokens]; ends: int64 [texts], where each text's tokens (with the end-of-text token) end.
    """

    ids: np.ndarray
    ends: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def text_ids(self, index: int) -> np.ndarray:
        """The ids of one text, with its end-of-text token."""
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]


class Tokens:
    """A tokenizer.json; `eot` is the id that ends a text; `dtype` is uint16 up to 65,536 ids, else uint32."""

    def __init__(self, data: bytes, digest: str, end_of_text: str) -> None:
        if object_digest(data) != digest:
            raise InputFault(
                f"the tokenizer has digest {object_digest(data)}, expected {digest}",
                cause="tokenizer.json was changed after the mix was prepared",
                next_step="fetch it again from where the mix was published",
            )
        try:
            self._reference = ReferenceTokenizer.from_str(data.decode())
            self._fast = FastTokenizer.from_json_str(data.decode())
        except Exception as error:  # both libraries raise bare Exception
            raise InputFault(f"the tokenizer with digest {digest} cannot be loaded: {error}") from error
        _check_form(json.loads(data), self._reference, digest)
        eot = self._reference.token_to_id(end_of_text)
        if eot is None:
            raise InputFault(f"the tokenizer has no token {end_of_text!r} to end a text with")
        self._reference.encode_special_tokens = True
        self.data, self.digest, self.eot = data, digest, int(eot)
        self.vocab: int = self._reference.get_vocab_size()
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")

    def encode(self, texts: Iterable[str]) -> Encoded:
        """All texts, each followed by the end-of-text token."""
        pieces, lengths = [np.empty(0, self.dtype)], [np.empty(0, np.int64)]
        for batch in _batches(texts):
            flat, offsets = self._fast.encode_batch_flat(batch, add_special_tokens=False, split_special_tokens=True)
            ids, bounds = np.frombuffer(flat, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)
            if ids.size and int(ids.max()) >= self.vocab:
                raise MachineFault(f"the encoder returned id {int(ids.max())}, the vocabulary has {self.vocab}")
            pieces.append(np.insert(ids, bounds[1:], self.eot).astype(self.dtype))
            lengths.append(np.diff(bounds) + 1)
        return Encoded(np.concatenate(pieces), np.cumsum(np.concatenate(lengths)))

    def text(self, ids: np.ndarray) -> str:
        """The text of these ids; what is cut off within a character, at either end, shows as U+FFFD."""
        return self._reference.decode(ids.tolist(), skip_special_tokens=False)

    def id_bytes(self) -> list[bytes] | None:
        """What each id stands for, as UTF-8; None if the tokenizer is no byte-level one."""
        if not isinstance(self._reference.decoder, decoders.ByteLevel):
            return None
        pieces = [b""] * (1 + max(self._reference.get_vocab(with_added_tokens=True).values()))
        for piece, number in self._reference.get_vocab(with_added_tokens=True).items():
            plain = all(letter in _BYTES for letter in piece)
            pieces[number] = bytes(_BYTES[letter] for letter in piece) if plain else piece.encode()
        return pieces

    def check(self, text: str, ids: np.ndarray) -> None:
        """MachineFault unless the defining library gives the same ids for `text` (plus the end-of-text token)."""
        expected = [*self._reference.encode(text, add_special_tokens=False).ids, self.eot]
        if expected != ids.tolist():
            at = next((i for i, pair in enumerate(zip(expected, ids.tolist(), strict=False)) if pair[0] != pair[1]), -1)
            raise MachineFault(
                f"two tokenizer libraries disagree at token {at} of {text[:60]!r}: "
                f"tokenizers gives {len(expected)} ids {expected[at : at + 4]}, "
                f"fastokens {len(ids)} ids {ids.tolist()[at : at + 4]}",
                cause="a version of fastokens whose rules differ from the tokenizer's",
                next_step="install the versions of constraints.txt",
            )


@dataclass(frozen=True)
class TokensPart:
    """Where the processes of a preparation find the tokenizer."""

    parts: Parts
    digest: str
    end_of_text: str

    def open(self) -> Tokens:
        """The tokenizer, loaded once in each process."""
        return _opened(self)


@lru_cache(maxsize=1)
def _opened(part: TokensPart) -> Tokens:
    return Tokens(part.parts.about(TOKENIZER_PART)["json"].encode(), part.digest, part.end_of_text)


def _check_form(document: dict[str, Any], reference: ReferenceTokenizer, digest: str) -> None:
    """InputFault if the file asks for ids that are not all of a text and nothing else, or for ids it does not get."""
    why = ""
    if cut := document.get("truncation"):
        why = f"cuts texts off after {cut['max_length']} tokens"
    elif document.get("padding"):
        why = "fills texts up with padding"
    elif dropout := document["model"].get("dropout"):
        why = f"draws at random which merges it skips (dropout {dropout})"
    for token in document["added_tokens"]:
        if (given := reference.token_to_id(token["content"])) != token["id"]:
            why = f"gives {token['content']!r} the id {token['id']}, as which the defining library reads {given}"
    if why:
        raise InputFault(
            f"the tokenizer with digest {digest} {why}",
            cause="it was saved as it was used elsewhere, or edited by hand",
            next_step="set truncation, padding and dropout to null, number added tokens without a gap, pin it again",
        )


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE (Radford et al. 2019) writes for each byte: itself, if that can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(unseen)}


_BYTES = _byte_letters()


def train(spec: TrainTokenizer, texts: Iterator[str]) -> bytes:
    """tokenizer.json of a byte-level BPE trained on `texts`; InputFault if they are too few or too many to count."""
    tokenizer = ReferenceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab,
        min_frequency=MIN_FREQUENCY,
        special_tokens=list(spec.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_countable(texts), trainer)
    if tokenizer.get_vocab_size() != spec.vocab:
        raise InputFault(
            f"the tokenizer's sample gives {tokenizer.get_vocab_size()} ids, the recipe asks for {spec.vocab}",
            cause="too little text for so large a vocabulary",
            next_step="lower tokenizer.vocab, or add text (and tokenizer.sample_bytes)",
        )
    return tokenizer.to_str(pretty=False).encode()


def _countable(texts: Iterator[str]) -> Iterator[str]:
    """The texts, as long as no count of pairs can wrap: a sample's last text, in each source, may be of any length."""
    size = 0
    for text in texts:
        size += len(text.encode())
        if size > MAX_TRAINED:
            raise InputFault(
                f"the tokenizer's sample has {size} bytes or more, at most {MAX_TRAINED} can be counted",
                cause="texts of hundreds of megabytes at the end of the sources' samples",
                next_step="lower tokenizer.sample_bytes, or leave out such files",
            )
        yield text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
