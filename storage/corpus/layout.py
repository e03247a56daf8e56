"""Where each document of a source lies: held out or not, and from which token of its part's stream on.

Each part is one token stream, cut into disjoint windows of seq_len + 1 tokens: window w holds tokens
[w * window_tokens, (w + 1) * window_tokens). Documents may cross windows. The training part has as many windows as it
fills, the other exactly spec.held_out_windows: documents are held out until they fill those. What is left is the tail,
which is counted. Both parts keep the documents in their shuffled order.

A text that is held out of one source is held out of all: each source makes its choice alone, then every document whose
digest any of them chose joins those held out of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.corpus.documents import choose_held_out
from storage.corpus.numbering import digests
from storage.corpus.parts import Parts
from storage.corpus.runs import Encode
from storage.corpus.spec import MixSpec
from storage.errors import InputFault


@dataclass(frozen=True)
class Placed:
    """A source's documents by place: tokens int64[n], with the end-of-text token; names uint64[n, 4], the digests by
    which they are held out; held bool[n]."""

    source: str
    tokens: np.ndarray
    names: np.ndarray
    held: np.ndarray


@dataclass(frozen=True)
class Stream:
    """One part's token stream: the places of its documents, where each ends (int64, tokens), and how many windows."""

    places: np.ndarray
    ends: np.ndarray
    window_tokens: int
    windows: int

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def tail(self) -> int:
        """Tokens at the end that are in no window."""
        return self.tokens - self.windows * self.window_tokens


def placed(parts: Parts, spec: MixSpec, source: str, runs: Sequence[Encode]) -> Placed:
    """Read off the runs how long each document is, and choose those held out of this source."""
    count = sum(parts.about(run.name)["documents"] for run in runs)
    tokens, names = np.empty(count, np.int64), np.empty((count, 4), np.uint64)
    for run in runs:
        table = parts.table(run.name)
        place = table["place"].to_numpy()
        tokens[place] = np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in table["ids"].chunks])
        names[place] = digests(table["held"])
    held = np.zeros(count, dtype=bool)
    held[choose_held_out(names, tokens, spec.held_out_windows * spec.window_tokens)] = True
    return Placed(source, tokens, names, held)


def hold_out_everywhere(sources: Sequence[Placed]) -> None:
    """A text that is held out of one source is held out of all; in place."""
    chosen = {row.tobytes() for source in sources for row in source.names[source.held]}
    first = np.array([np.frombuffer(name, np.uint64)[0] for name in chosen], dtype=np.uint64)
    for source in sources:
        for index in np.nonzero(np.isin(source.names[:, 0], first) & ~source.held)[0].tolist():
            source.held[index] = source.names[index].tobytes() in chosen


def streams(spec: MixSpec, source: Placed) -> dict[str, Stream]:
    """The two parts of a source; InputFault if it cannot fill its held-out windows and one training window."""
    train = int(source.tokens[~source.held].sum()) // spec.window_tokens
    # Where its own texts are too few it chose none, and yet others may have chosen some of them.
    if int(source.tokens[source.held].sum()) < spec.held_out_windows * spec.window_tokens or not train:
        raise InputFault(
            f"source {source.source} has {int(source.tokens.sum())} tokens in {len(source.tokens)} documents: too few "
            f"for {spec.held_out_windows} held-out windows and one training window of {spec.window_tokens} tokens",
            cause="too small a corpus, or one text that makes up most of it",
            next_step="add files to the source, or lower held_out_windows or seq_len in the recipe",
        )
    counts = {"train": (~source.held, train), "held_out": (source.held, spec.held_out_windows)}
    return {
        part: Stream(np.nonzero(chosen)[0], np.cumsum(source.tokens[chosen]), spec.window_tokens, windows)
        for part, (chosen, windows) in counts.items()
    }
