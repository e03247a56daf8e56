"""A small run published to a real S3 server, and read from there alone."""

import pytest

from storage.audit.release import check_release
from storage.copying import OBJECTS, PublishProgress
from storage.errors import Refused
from storage.ledger import HEADER_KEY
from storage.publish import publish
from storage.release import RELEASE_KEY
from storage.store import S3Store
from tests.s3.server import BUCKET, RCLONE, installed, rclone
from tests.storage.conftest import Small, _original, made, stand_in  # noqa: F401  (fixtures)


class Stopped(Exception):
    """What a test raises in the middle of publishing."""


def stop_after(objects: int) -> object:
    def report(progress: PublishProgress) -> None:
        if progress.objects == objects:
            raise Stopped

    return report


def test_published_stopped_continued_and_read(made: Small, store: S3Store) -> None:  # noqa: F811
    for objects in (1, 30):
        with pytest.raises(Stopped):
            publish(made.store, made.mix, store, made.key, report=stop_after(objects))  # type: ignore[arg-type]
        assert RELEASE_KEY not in store.list()
    result = publish(made.store, made.mix, store, made.key)
    there = len(result.release.objects) - result.copied
    assert 30 <= there < 30 + 2 * OBJECTS and result.uri == store.uri
    assert {key: store.read(key) for key in store.list()} == {k: made.published.read(k) for k in made.published.list()}
    again = S3Store.open(store.uri)
    assert publish(made.store, made.mix, again, made.key).copied == 0
    assert check_release(again).body.head == made.run().ledger.head


def test_another_run_under_the_same_address_is_refused(made: Small, store: S3Store) -> None:  # noqa: F811
    store.create(HEADER_KEY, b"of another run")
    with pytest.raises(Refused, match="does not hold run"):
        publish(made.store, made.mix, store, made.key)
    assert store.list() == [HEADER_KEY] and store.read(HEADER_KEY) == b"of another run"


def test_nothing_is_published_to_a_server_that_overwrites(
    made: Small,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(*RCLONE)
    with rclone(made.folder / "rclone") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        store = S3Store.open(f"s3://{BUCKET}/run")
        with pytest.raises(Refused, match="overwrites objects that If-None-Match should keep"):
            publish(made.store, made.mix, store, made.key)
        assert store.list() == []
