"""An audit from a real server: what it transfers, held against what it needs; copies; the cache."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.spec import ModelSpec
from storage import checkpoint
from storage.audit.keys import Key, load_or_create_key
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.cache import FOLDER
from storage.ledger import HEADER_KEY
from storage.mirrors import open_copies
from storage.publish import publish
from storage.release import RELEASE_KEY
from storage.store import LocalStore, S3Store, Store
from tests.s3.proxy import Proxy, gets, proxied, wrong_answer
from tests.s3.server import BUCKET, Server
from tests.storage import small
from tests.storage.conftest import Small

STEP = 8
SHAPE = ModelSpec(vocab=300, d_model=768, layers=1, heads=12, kv_heads=2, head_dim=64, ffn=2048, seq_len=16, window=8)


@pytest.fixture(scope="module")
def release(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStore]:
    """A run of 12 steps with 79 MB of state in a folder, and a copy of it on the server at s3://BUCKET/audited."""
    made = Small(tmp_path_factory.mktemp("audited"))
    with small.stand_in(), pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        small.begin(made.folder, made.store, made.mix, model=SHAPE)
        made.train()
        publish(made.store, made.mix, made.published, made.key)
        publish(made.store, made.mix, S3Store.open(f"s3://{BUCKET}/audited"), made.key)
        yield made.published


@pytest.fixture
def near(release: LocalStore, at_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(at_server.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", between.endpoint)
        yield between


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


def needed(store: Store, step: int) -> int:
    """Bytes: the ledger, RELEASE.json, one checkpoint, the manifest, the step's windows, and all leaves, since an audit
    checks every entry's batch against the mix."""
    with small.stand_in():
        run = Small(Path(store.uri.removeprefix("file://")).parent).release()
    first = max(k for k in checkpoint.steps(store) if k <= step)
    manifest = checkpoint.load_manifest(store, run.ledger, first)
    keys = [RELEASE_KEY, *store.list("ledger/"), "mix/manifest.json", checkpoint.checkpoint_key(first)]
    keys += [checkpoint.object_key(digest) for digest in (manifest.leaves, *(part.digest for part in manifest.parts))]
    keys += [key for key in store.list("mix/windows/") if key.endswith(".leaves") and "/train/" in key]
    windows = sum(entry.windows for entry in list(run.ledger)[first : step + 1])
    return sum(store.size(key) for key in keys) + windows * run.stream.window_tokens * 2


def test_an_audit_transfers_what_it_needs_once(release: LocalStore, near: Proxy, auditor: Key) -> None:
    with small.stand_in():
        verdict = audit_step(open_copies([f"s3://{BUCKET}/audited"]), STEP, "cpu", auditor)
    assert verdict.outcome is Outcome.MATCH, verdict.detail
    need = needed(release, STEP)
    asked = Counter(
        (request.path, request.headers.get("Range")) for request in near.requests if request.method == "GET"
    )
    twice = [path for (path, _), times in asked.items() if times > 1]
    ratio, both = near.sent / need, (near.sent + near.received) / need
    print(f"{need / 1e6:.2f} MB needed, {ratio:.4f} of it came, {both:.4f} both ways, {len(near.requests)} requests")
    assert not twice and both < 1.1


def test_verify_and_audit_from_a_bad_copy_and_a_sound_one(
    release: LocalStore, at_server: Server, auditor: Key, tmp_path: Path
) -> None:
    """Of what lies on the server a ledger part is NUL and a checkpoint's tensors are gone; a folder has the rest."""
    store = S3Store.open(f"s3://{BUCKET}/{tmp_path.name}")
    with small.stand_in():
        made = Small(release.root.parent)
        publish(made.store, made.mix, store, made.key)
        parts = checkpoint.load_manifest(release, made.release().ledger, 5).parts
        damaged = {"ledger/00000007.jsonl", *(checkpoint.object_key(part.digest) for part in parts)}
        for key in damaged:
            store.delete(key)
        store.create("ledger/00000007.jsonl", bytes(release.size("ledger/00000007.jsonl")))
        alone = audit_step(open_copies([store.uri]), STEP, "cpu", auditor)
        assert alone.outcome is Outcome.INPUT_FAULT and "ledger/00000007.jsonl" in alone.detail
        copies = open_copies([store.uri, release.uri])
        verdict = audit_step(copies, STEP, "cpu", auditor)
        assert verdict.outcome is Outcome.MATCH, verdict.detail
        assert {(copy.store, copy.key) for copy in verdict.bad_copies} == {(store.uri, key) for key in damaged}
        assert check_release(open_copies([store.uri, release.uri], cached=False)).body.steps == 12
        assert check_release(open_copies([f"s3://{BUCKET}/audited"], cached=False)).body.steps == 12


def test_a_second_audit_takes_what_was_kept(
    release: LocalStore, near: Proxy, auditor: Key, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    sent = []
    for _ in range(2):
        before = near.sent
        with small.stand_in():
            verdict = audit_step(open_copies([f"s3://{BUCKET}/audited"]), STEP, "cpu", auditor)
        assert verdict.outcome is Outcome.MATCH and verdict.bad_copies == ()
        sent.append(near.sent - before)
    assert sent[0] > 70e6 and sent[1] < release.size(RELEASE_KEY) + release.size(HEADER_KEY) + 2000


def test_an_answer_damaged_on_the_way_is_asked_for_again(release: LocalStore, near: Proxy, auditor: Key) -> None:
    """Each kind of read once: none is blamed on the store."""
    for part in ("ledger", "checkpoints", "objects", "windows", "manifest"):
        near.fault(wrong_answer, when=lambda request, part=part: gets(request) and part in request.path)  # type: ignore[misc]
    with small.stand_in():
        verdict = audit_step(open_copies([f"s3://{BUCKET}/audited"]), STEP, "cpu", auditor)
    assert (verdict.outcome, verdict.bad_copies, near.faults_left) == (Outcome.MATCH, (), 0), verdict.detail
