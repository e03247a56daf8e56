"""One source's documents, encoded, into training and held-out windows, and the index that ties the two together.

Each part is one token stream, cut into disjoint windows of seq_len + 1 tokens: window w holds tokens
[w * window_tokens, (w + 1) * window_tokens). Documents may cross windows. The training part has as many windows as it
fills, the other exactly spec.held_out_windows: documents are held out until they fill those. What is left is the tail,
which is counted. Both parts keep the documents in their shuffled order.
"""

from dataclasses import dataclass

import numpy as np

from storage.corpus.documents import Documents, choose_held_out, shuffled
from storage.corpus.keyed import key, permute
from storage.corpus.spec import MixSpec
from storage.corpus.tokens import Encoded, Tokens
from storage.errors import InputFault

CHECKED = 4  # texts of every shard that are encoded by both libraries
CHECKED_CHARS = 200_000  # a longer text is not checked: the slow library would take seconds over it


@dataclass(frozen=True)
class Part:
    """A token stream: its documents (canonical numbers, in stream order), where each ends, all ids, window count."""

    documents: np.ndarray
    ends: np.ndarray
    ids: np.ndarray
    window_tokens: int
    count: int

    @property
    def windows(self) -> np.ndarray:
        """uint[count, window_tokens]."""
        return self.ids[: self.count * self.window_tokens].reshape(self.count, self.window_tokens)

    @property
    def tail(self) -> int:
        """Tokens at the end that are in no window."""
        return len(self.ids) - self.count * self.window_tokens


@dataclass(frozen=True)
class Packed:
    train: Part
    held_out: Part


def pack(spec: MixSpec, source: str, documents: Documents, tokens: Tokens) -> Packed:
    """Encode, split and cut a source. InputFault if it cannot fill its held-out windows and one training window."""
    order = shuffled(spec.seed, source, len(documents))
    texts = [documents.texts[i] for i in order]
    encoded = tokens.encode(texts)
    held = np.zeros(len(texts), dtype=bool)
    held[choose_held_out(spec.seed, texts, encoded.lengths, spec.held_out_windows * spec.window_tokens)] = True
    left = int(encoded.lengths[~held].sum()) // spec.window_tokens
    if not held.any() or not left:
        raise InputFault(
            f"source {source} has {len(encoded.ids)} tokens in {len(texts)} documents: too few for "
            f"{spec.held_out_windows} held-out windows and one training window of {spec.window_tokens} tokens",
            cause="too small a corpus, or one text that makes up most of it",
            next_step="add files to the source, or lower held_out_windows or seq_len in the recipe",
        )
    _check_sample(spec, source, texts, tokens, encoded)
    return Packed(
        _part(encoded, order, ~held, spec.window_tokens, left),
        _part(encoded, order, held, spec.window_tokens, spec.held_out_windows),
    )


def _part(encoded: Encoded, order: np.ndarray, chosen: np.ndarray, window_tokens: int, count: int) -> Part:
    lengths = encoded.lengths
    ids = encoded.ids[np.repeat(chosen, lengths)]
    return Part(order[chosen], np.cumsum(lengths[chosen]), ids, window_tokens, count)


def _check_sample(spec: MixSpec, source: str, texts: list[str], tokens: Tokens, encoded: Encoded) -> None:
    """Encode a keyed sample of texts from every shard's worth of tokens with the defining library as well."""
    shard_tokens = spec.shard_windows * spec.window_tokens
    starts = np.searchsorted(encoded.ends, np.arange(0, len(encoded.ids), shard_tokens), side="right")
    for shard, (start, stop) in enumerate(zip(starts, [*starts[1:], len(texts)], strict=True)):
        span = int(max(stop, start + 1) - start)
        drawn = permute(key(spec.seed, "tokenizer check", source, shard), span, np.arange(min(CHECKED, span)))
        for index in (start + drawn).tolist():
            if len(texts[index]) <= CHECKED_CHARS:
                tokens.check(texts[index], encoded.text_ids(index))
