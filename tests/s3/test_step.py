"""One step of a mix of OPEN-1B's geometry, read from a real server: hardly more bytes than its windows have."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kernels.digest import digest
from storage.corpus.manifest import (
    Manifest,
    Mix,
    SourceManifest,
    StoredFile,
    TokenizerManifest,
    Windows,
    held_out_root,
)
from storage.corpus.spec import MixSpec
from storage.leaf_tree import CHUNK, chunks_of, path_size
from storage.store import S3Store, Store
from storage.stream import Stream
from storage.windows import LEAF, leaf, shard_objects, stored_shard
from tests.s3.proxy import Proxy, proxied
from tests.s3.server import BUCKET, Server

STEP, TOKENS, SHARD = 768, 4097, 16_384  # windows, tokens, windows: open_1b's step, and twice its shards
SOURCES = ("a", "b", "c", "d")


def spec() -> MixSpec:
    pinned = {"kind": "local", "path": "/none", "licence": "CC0-1.0", "extract": {"kind": "text"}}
    files = [pinned | {"size": 1, "sha256": "0" * 64}]
    return MixSpec.model_validate({
        "seed": 7, "seq_len": TOKENS - 1, "shard_windows": SHARD, "held_out_windows": 4, "block": 65_536,
        "tokenizer": {"kind": "train", "vocab": 50_257, "sample_bytes": 100_000},
        "sources": [{"name": name, "files": files} for name in SOURCES],
    })  # fmt: skip


def _part(store: Store, name: str, part: str, count: int, files: dict[str, StoredFile]) -> Windows:
    """A part of `count` made-up windows, one shard, written to the store."""
    rows = np.random.default_rng([ord(name), count]).integers(0, 50_257, (count, TOKENS), "<u2")
    shard, objects, rows_at = shard_objects(f"windows/{name}/{part}", 0, rows)
    for key, data in objects.items():
        assert store.create(key, data)
    files |= stored_shard(objects, rows_at)
    return Windows(documents=1, tokens=rows.size, windows=count, tail=0, shards=(shard,))


@pytest.fixture(scope="module")
def manifest(server: Server) -> Iterator[Manifest]:
    """Of a mix of one full shard for each of four sources, 134 MB each, that lies on the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        store = S3Store.open(f"s3://{BUCKET}/mix")
        files: dict[str, StoredFile] = {}
        sources = []
        for name in SOURCES:
            train, held_out = (_part(store, name, *part, files) for part in (("train", SHARD), ("held_out", 1)))
            sources.append(SourceManifest(name=name, text_bytes=1, skipped={}, train=train, held_out=held_out))
        fields: dict[str, Any] = {"dtype": "uint16", "window_tokens": TOKENS, "sources": tuple(sources)}
        tokenizer = TokenizerManifest(digest="0" * 64, vocab=50_257, end_of_text=0)
        yield Manifest.of(
            Mix(
                spec=spec(), tokenizer=tokenizer, counts=(SHARD,) * 4, next_pass={},
                held_out_root=held_out_root(tuple(sources)), **fields,
            ),
            files,
        )  # fmt: skip


@pytest.fixture
def near(at_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(at_server.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", between.endpoint)
        yield between


def report(what: str, count: int, proxy: Proxy) -> tuple[float, float]:
    """(bytes that came, bytes both ways) against those of `count` windows; printed."""
    size = count * TOKENS * 2
    came, both = proxy.sent / size, (proxy.sent + proxy.received) / size
    print(f"{what}: {len(proxy.requests)} requests, {came:.4f} of the windows' bytes came, {both:.4f} both ways")
    return came, both


@pytest.mark.parametrize(("count", "at_a_time"), [(STEP, STEP), (STEP, 16), (128, 1)])
def test_a_step_of_the_first_pass(manifest: Manifest, near: Proxy, count: int, at_a_time: int) -> None:
    stream = Stream(manifest, S3Store.open(f"s3://{BUCKET}/mix"))
    first = 20 * STEP
    read = np.concatenate([stream.windows(i, at_a_time) for i in range(first, first + count, at_a_time)])
    came, both = report(f"{count} windows, {at_a_time} at a time", count, near)
    assert came < 1.02 if at_a_time == STEP else both < 1.2
    assert digest(b"".join(leaf(row.tobytes()) for row in read), "batch") == stream.batch_digest(first, count)


def test_a_step_of_a_later_pass(manifest: Manifest, near: Proxy) -> None:
    """Its rows lie anywhere: each is a request of its own, and so are most of the leaves.

    What proves a window that lies alone is its chunk of leaves, BLAKE3's smallest unit, and the path from there to the
    shard's digest: 16 % of its bytes, whatever the way they come. Held against that floor, requests add their heads.
    """
    stream = Stream(manifest, S3Store.open(f"s3://{BUCKET}/mix"))
    first, count = 4 * SHARD + 20 * STEP, 128
    assert set(stream.locate(first, count).passes.tolist()) == {1}
    stream.windows(first, count)
    came, _ = report(f"{count} windows in a later pass", count, near)
    floor = 1 + (CHUNK + path_size(chunks_of(SHARD * LEAF))) / (TOKENS * 2)
    print(f"the floor is {floor:.4f}, {came / floor:.4f} of it came")
    assert came < 1.1 * floor


def test_a_batch_digest_needs_no_window(manifest: Manifest, near: Proxy) -> None:
    Stream(manifest, S3Store.open(f"s3://{BUCKET}/mix")).batch_digest(20 * STEP, STEP)
    assert near.sent < 100_000
