"""A published run checked without a replay. Whoever publishes also signs: every forgery here is listed and signed."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kernels import canonical
from kernels.digest import digest
from storage.audit.release import check_release
from storage.errors import CheckpointFault, InputFault, LedgerFault, WindowFault
from storage.ledger import HEADER_KEY, Ledger
from storage.mirrors import open_copies
from storage.objects import MAX_OBJECT
from storage.publish import publish
from storage.release import (
    MAX_RELEASE,
    PURPOSE,
    RELEASE_KEY,
    Group,
    Object,
    Release,
    ReleaseBody,
    grouped,
    load_release,
)
from storage.store import LocalStore, object_digest
from storage.stream import Stream
from storage.windows import leaf
from tests.storage.conftest import Small, flip

WINDOWS = "mix/windows/nouns/train/00000"


def signed(made: Small, **changes: Any) -> LocalStore:
    """The published store, its list made anew over what lies there, with these fields of the release changed."""
    store, body = made.published, _body(made)
    objects = {
        key: Object(digest=object_digest(data), size=len(data))
        for key in store.list()
        if key != RELEASE_KEY
        for data in [store.read(key)]
    }
    body = body.model_copy(update={"classes": grouped(changes.pop("objects", objects))} | changes)
    signature = made.key.sign(body.canonical(), PURPOSE)
    release = Release.model_construct(body=body, signature=signature)  # whatever a stranger may sign
    store.path(RELEASE_KEY).write_bytes(release.canonical())
    return store


def _body(made: Small) -> ReleaseBody:
    return Release.parse(made.published.read(RELEASE_KEY), RELEASE_KEY).body


def edit(made: Small, key: str, change: Callable[[Any], None]) -> None:
    """Change a canonical JSON object in place."""
    document = canonical.loads(made.published.read(key))
    change(document)
    made.published.path(key).write_bytes(canonical.dumps(document))


def test_an_honest_release_is_genuine(made: Small) -> None:
    assert check_release(made.published).body == _body(made)
    assert check_release(signed(made)).body == _body(made)


@pytest.mark.parametrize("field", ["trajectory_root", "mix_root"])
def test_roots_are_the_ledgers(made: Small, field: str) -> None:
    named = field.replace("_", " ")
    with pytest.raises(InputFault, match=f"its {named} is {'0' * 64}, the ledger's is"):
        check_release(signed(made, **{field: "0" * 64}))


@pytest.mark.parametrize(
    "left_out", [HEADER_KEY, "ledger/00000003.jsonl", "mix/manifest.json", f"{WINDOWS}.arrow",
                 "checkpoints/00000005.json", "digests/00000002.json"],
)  # fmt: skip
def test_nothing_that_a_replay_reads_is_left_out(made: Small, left_out: str) -> None:
    objects = {key: entry for key, entry in _body(made).objects.items() if key != left_out}
    with pytest.raises(InputFault, match=f"does not list {left_out}"):
        check_release(signed(made, objects=objects))


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "a//b", "", ".tmp-1", "a\nb"])
def test_a_listed_path_out_of_the_store_is_a_fault_of_the_release(made: Small, key: str) -> None:
    classes = _body(made).classes
    export = Group(count=1, bytes=1, objects={key: Object(digest="0" * 64, size=1)})
    with pytest.raises(InputFault, match=r"RELEASE.json: .* object key .* is not allowed in class export"):
        check_release(signed(made, classes=classes | {"export": export}))


def test_a_listed_size_is_the_objects(made: Small) -> None:
    objects = _body(made).objects
    longer = objects["recipe.yaml"].model_copy(update={"size": 10**9})
    with pytest.raises(InputFault, match=r"recipe.yaml holds 12 bytes, RELEASE.json says 1000000000"):
        check_release(signed(made, objects=objects | {"recipe.yaml": longer}))


def test_an_object_that_nobody_could_read_cannot_be_listed(made: Small) -> None:
    """Terabytes of nothing are a small file; nothing of it is read, and no memory taken for it."""
    size = 4 * 10**12
    entry = _body(made).objects["recipe.yaml"].model_copy(update={"size": size})
    store = signed(made, objects=_body(made).objects | {"recipe.yaml": entry})
    with store.path("recipe.yaml").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(InputFault, match=rf"recipe.yaml.size: .* less than or equal to {MAX_OBJECT}, found '{size}'"):
        check_release(store)
    with made.store.path("recipe.yaml").open("r+b") as file:
        file.truncate(size)
    target = LocalStore(made.folder / "another")
    with pytest.raises(InputFault, match=rf"recipe.yaml holds {size} bytes, at most {MAX_OBJECT} are allowed"):
        publish(made.store, made.mix, target, made.key)
    assert target.list() == []


def test_what_a_stranger_signed_is_not_parsed(made: Small) -> None:
    """Thirty megabytes of JSON would take a gigabyte; they take what the signature needs."""
    junk = b'{"body":{"a":[' + b'{"b":0},' * 4_000_000 + b'0]},"signature":"' + b"0" * 128 + b'"}'
    made.published.path(RELEASE_KEY).write_bytes(junk)
    tracemalloc.start()
    try:
        for store in (made.published, open_copies([made.published.uri, made.published.uri + "/mix"])):
            with pytest.raises(InputFault, match="signature is not that of the run's trainer"):
                load_release(store, Ledger(made.store))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(junk)
    finally:
        tracemalloc.stop()
    made.published.path(RELEASE_KEY).write_bytes(junk * 2)
    with pytest.raises(InputFault, match=f"at most {MAX_RELEASE} are allowed"):
        load_release(made.published, Ledger(made.store))


@pytest.mark.parametrize("key", ["mix/tokenizer.json", "mix/docs/nouns/train/00000.parquet", f"{WINDOWS}.arrow"])
def test_an_exchanged_file_of_the_mix(made: Small, key: str) -> None:
    flip(made.published.path(key), -9)
    with pytest.raises(InputFault, match=f"{key} has digest .*, run and mix demand"):
        check_release(signed(made))


def test_a_window_that_is_not_its_leaf(made: Small) -> None:
    """The manifest's list of files is under no root, so it can be made anew over another window."""
    _rewrite_window(made, 7)
    with pytest.raises(WindowFault, match=f"{WINDOWS}.arrow: window 0 of shard 0"):
        check_release(signed(made))


def test_an_id_that_no_tokenizer_gives(made: Small) -> None:
    """Leaves, roots and the whole ledger can be made anew over any ids; a kernel must not see them."""
    stream = made.release().stream
    data = _rewrite_window(made, 65_535)
    leaves = bytearray(made.published.read(f"{WINDOWS}.leaves"))
    leaves[:32] = leaf(data)
    made.published.path(f"{WINDOWS}.leaves").write_bytes(leaves)
    (source,) = (s for s in stream.manifest.mix.sources if s.name == "nouns")
    forged = digest(bytes(leaves), "shard")
    shards = (source.train.shards[0].model_copy(update={"digest": forged}), *source.train.shards[1:])
    train = source.train.model_copy(update={"shards": shards})
    sources = tuple(s.model_copy(update={"train": train}) if s is source else s for s in stream.manifest.mix.sources)
    mix = stream.manifest.mix.model_copy(update={"sources": sources})
    stream = Stream(stream.manifest.model_copy(update={"mix": mix}), stream.store, stream.base)
    with pytest.raises(WindowFault, match="window 0 of this source holds id 65535 at place 3, the tokenizer has 300"):
        stream.check()


def _rewrite_window(made: Small, token: int) -> bytes:
    """Exchange one id of the first window, and what the manifest says of the file; the window's bytes."""
    key = f"{WINDOWS}.arrow"
    manifest, data = made.release().stream.manifest, bytearray(made.published.read(key))
    start, size = manifest.files[key[4:]].rows_at, 2 * manifest.mix.window_tokens
    data[start + 6 : start + 8] = token.to_bytes(2, "little")
    made.published.path(key).write_bytes(data)
    edit(made, "mix/manifest.json", lambda m: m["files"][key[4:]].update(digest=object_digest(bytes(data))))
    return bytes(data[start : start + size])


def test_a_checkpoint_of_another_step(made: Small) -> None:
    twin = made.published.read("checkpoints/00000010.json")
    made.published.path("checkpoints/00000005.json").write_bytes(twin)
    with pytest.raises(CheckpointFault, match=r"checkpoints/00000005.json is state 10 .* expected 5"):
        check_release(signed(made))


def test_spliced_weights(made: Small) -> None:
    """A part with another value, named by its own digest: only the leaves tell."""
    key = "checkpoints/00000005.json"
    old = canonical.loads(made.published.read(key))["parts"][0]["digest"]
    data = bytearray(made.published.read(f"objects/{old}"))
    data[-1] ^= 1
    new = object_digest(bytes(data))
    made.published.create(f"objects/{new}", bytes(data))
    edit(made, key, lambda m: m["parts"][0].update(digest=new))
    with pytest.raises(CheckpointFault, match=f"objects/{new}: tensor weights/head, leaf 1"):
        check_release(signed(made))


@pytest.mark.parametrize(("group", "what"), [("tensors", "state root"), ("gradient", "gradient root")])
def test_digests_beside_the_ledger_prove_themselves(made: Small, group: str, what: str) -> None:
    key = "digests/00000004.json"
    edit(made, key, lambda d: d[group].update({next(iter(d[group])): "0" * 64}))
    with pytest.raises(InputFault, match=f"{key}: its digests give {what}"):
        check_release(signed(made))


def test_a_ledger_and_a_mix_that_do_not_fit(made: Small) -> None:
    edit(made, HEADER_KEY, lambda h: h["spec"]["model"].update(vocab=299))
    for key in made.published.list("ledger/0"):
        made.published.delete(key)
    with pytest.raises(LedgerFault, match="the tokenizer has 300 ids, the model's vocabulary 299"):
        check_release(signed(made))
