"""The comparison of a peer's ids with those in our windows: it takes what is the same, and sees one id that is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage import recipe as recipes
from storage.corpus.prepare import prepare
from storage.store import LocalStore
from storage.stream import Stream
from tests.bench import corpus_input, corpus_peers
from tests.flows import tiny

Prepared = tuple[corpus_input.Texts, Stream, Path]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A tiny mix as documents, as windows, and what both peers would have made of it."""
    folder = tmp_path_factory.mktemp("bench-corpus")
    spec = recipes.load(tiny.recipe(folder)).mix
    store, out = LocalStore(folder / "mix"), folder / "out"
    manifest = prepare(spec, folder / "cache", store)
    texts = corpus_input.write_texts(spec, folder / "texts")
    (out / "tokens").mkdir(parents=True)
    corpus_peers.tokenizers(texts.folder, folder / "mix" / "tokenizer.json", out)
    ids, ends = np.fromfile(out / "ids.u32", "<u4"), np.fromfile(out / "ends.u64", "<u8").astype(np.int64)
    first = 0
    for number, end in enumerate(texts.ends.tolist()):  # as datatrove lays them out
        start = int(ends[first - 1]) if first else 0
        mine = np.insert(ids[start : ends[end - 1]], ends[first:end] - start, manifest.mix.tokenizer.end_of_text)
        data = out / "tokens" / f"{number:05d}_unshuffled.ds"
        mine.astype("<u2").tofile(data)
        (ends[first:end] - start + np.arange(1, end - first + 1)).astype("<u8").tofile(f"{data}.index")
        first = end
    return texts, Stream.open(store), out


@pytest.mark.parametrize("peer", ["tokenizers", "datatrove"])
def test_equal_ids_are_found_equal(prepared: Prepared, peer: str) -> None:
    texts, stream, out = prepared
    documents = sum(part.documents for s in stream.manifest.mix.sources for part in (s.train, s.held_out))
    assert len(texts.addresses) == documents == texts.ends[-1]
    assert texts.size == sum(source.text_bytes for source in stream.manifest.mix.sources)
    assert corpus_input.compare(texts, stream, peer, out) > 0.9 * min(documents, corpus_input.SAMPLE)


@pytest.mark.parametrize("peer, name", [("tokenizers", "ids.u32"), ("datatrove", "tokens/00003_unshuffled.ds")])
def test_other_ids_are_seen(prepared: Prepared, peer: str, name: str) -> None:
    texts, stream, out = prepared
    good = (out / name).read_bytes()
    try:
        (out / name).write_bytes(bytes(2) + good[:-2])
        with pytest.raises(AssertionError, match=f"{peer} gives other ids"):
            corpus_input.compare(texts, stream, peer, out)
    finally:
        (out / name).write_bytes(good)
