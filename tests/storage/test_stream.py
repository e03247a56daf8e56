"""The stream against an independent slicer: documents to windows again, slowly, in another way."""

import json
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from tokenizers import Tokenizer

from kernels.digest import digest
from storage.corpus.keyed import key
from storage.errors import UsageError
from storage.store import MemoryStore
from storage.stream import Stream
from tests.storage.corpus.mixes import prepared
from tests.storage.corpus.test_keyed import slow_permute
from tests.storage.corpus.test_mixture import slow_locate

WIDTH = 32


class Slicer:
    """The small mix as lists of (address, token ids), without any code of storage/corpus but the keys."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        tokenizer = Tokenizer.from_str(store.read("tokenizer.json").decode())
        tokenizer.encode_special_tokens = True
        lines = (folder / "rows.jsonl").read_bytes().decode().split("\n")[:-1]
        rows = [(("rows.jsonl", "", i), json.loads(line)["text"]) for i, line in enumerate(lines)]
        texts = []
        with tarfile.open(folder / "texts.tar") as tar:
            for name in sorted(tar.getnames()):
                member = tar.extractfile(name)
                if name.endswith(".txt") and name != "docs/latin.txt" and member:
                    texts.append((("texts.tar", name, 0), member.read().decode()))
        self.train: list[list[tuple[Any, int]]] = []
        self.held_out: list[list[tuple[Any, int]]] = []
        for name, documents in (("rows", rows), ("texts", texts)):
            self._split(name, documents, tokenizer)

    def _split(self, name: str, documents: list[tuple[Any, str]], tokenizer: Tokenizer) -> None:
        order = [slow_permute(key(7, "documents", name), len(documents), i) for i in range(len(documents))]
        encoded = [[*tokenizer.encode(documents[i][1], add_special_tokens=False).ids, 0] for i in order]
        names = [self._name(documents[i][1]) for i in order]
        held: set[bytes] = set()
        sizes = {name: [len(e) for e, n in zip(encoded, names, strict=True) if n == name] for name in names}
        for one in sorted(sizes, key=lambda name: (max(sizes[name]) * 8 > 20 * WIDTH, name)):
            held.add(one)
            if sum(sum(sizes[name]) for name in held) >= 20 * WIDTH:
                break
        for wanted, into in ((False, self.train), (True, self.held_out)):
            chosen = [i for i in range(len(order)) if (names[i] in held) == wanted]
            into.append([(documents[order[i]][0], token) for i in chosen for token in encoded[i]])

    @staticmethod
    def _name(text: str) -> bytes:
        return blake3(" ".join(unicodedata.normalize("NFC", text).split()).encode(), key=key(7, "held out")).digest()

    def window(self, source: int, position: int) -> list[tuple[Any, int]]:
        return self.train[source][position * WIDTH : (position + 1) * WIDTH]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stream, Slicer]:
    folder, store = tmp_path_factory.mktemp("stream"), MemoryStore("stream")
    prepared(folder, store)
    return Stream.open(store), Slicer(folder, store)


def test_every_window_of_two_passes_equals_the_slicers(made: tuple[Stream, Slicer]) -> None:
    stream, slicer = made
    count = 2 * sum(stream.mixture.windows)
    found = stream.windows(0, count)
    walked = slow_locate(stream.mixture, count)
    for i, (source, _, _, position) in enumerate(walked):
        assert found[i].tolist() == [token for _, token in slicer.window(source, position)], i
    assert {passed for _, _, passed, _ in walked} >= {0, 1}


def test_held_out_windows_equal_the_slicers_and_share_no_text_with_training(made: tuple[Stream, Slicer]) -> None:
    stream, slicer = made
    expected = [[token for _, token in tokens[: 20 * WIDTH]] for tokens in slicer.held_out]
    assert stream.held_out().reshape(2, -1).tolist() == expected
    for train, held in zip(slicer.train, slicer.held_out, strict=True):
        assert not {address for address, _ in train} & {address for address, _ in held}
    leaves = {leaf for leaf in stream.leaves(0, sum(stream.mixture.windows))}
    assert not leaves & {bytes.fromhex(digest(window.tobytes(), "window")) for window in stream.held_out()}


def test_tails_and_ends(made: tuple[Stream, Slicer]) -> None:
    stream, slicer = made
    for entry, train in zip(stream.manifest.mix.sources, slicer.train, strict=True):
        assert (entry.train.tokens, entry.train.tail) == (len(train), len(train) % WIDTH)
        assert [token for _, token in train].count(0) == entry.train.documents


def test_any_part_of_the_stream_and_its_digests(made: tuple[Stream, Slicer]) -> None:
    stream, _ = made
    whole, leaves = stream.windows(0, 200), stream.leaves(0, 200)
    assert np.array_equal(stream.windows(123, 9), whole[123:132])
    assert leaves == [bytes.fromhex(digest(window.tobytes(), "window")) for window in whole]
    assert stream.batch_digest(123, 9) == digest(b"".join(leaves[123:132]), "batch")
    assert (whole.dtype, whole.shape) == (np.dtype("<u2"), (200, 32))
    assert stream.windows(5, 0).shape == (0, 32)
    with pytest.raises(UsageError, match="begins at 0"):
        stream.windows(-1, 2)


def test_the_manifest_says_where_passes_begin(made: tuple[Stream, Slicer]) -> None:
    stream, _ = made
    located = stream.locate(0, 2 * sum(stream.mixture.windows))
    for source, name in enumerate(stream.mixture.names):
        mine = np.nonzero((located.source == source) & (located.passes == 1))[0]
        assert stream.manifest.mix.next_pass[name] == mine[0]
