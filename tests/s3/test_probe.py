"""Nothing is written to a server that overwrites in spite of If-None-Match, in one request or in parts."""

from pathlib import Path
from typing import Any

import pytest

from storage.errors import Refused
from storage.store import S3Store
from tests.s3.faults import ALWAYS, years_old
from tests.s3.proxy import Proxy
from tests.s3.server import BUCKET, RCLONE, Server, client, installed, rclone


def objects(server: Server) -> list[str]:
    return [entry["Key"] for entry in client(server).list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_a_server_without_conditional_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed(*RCLONE).exists()
    with rclone(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        client(server).put_object(Bucket=BUCKET, Key="run/ours", Body=b"1")
        store = S3Store.open(f"s3://{BUCKET}/run")
        for _ in range(2):  # not only the first time
            with pytest.raises(
                Refused, match=r"overwrites objects that If-None-Match should keep \(put, put_in_parts\)"
            ):
                store.create("theirs", b"2")
        assert objects(server) == ["run/ours"]


def test_a_server_that_heeds_the_condition_in_single_requests_only(store: S3Store, at_server: Server) -> None:
    def forget(request: Any, **_: object) -> None:
        del request.headers["If-None-Match"]

    store._bucket.client.meta.events.register("before-sign.s3.CompleteMultipartUpload", forget)
    with pytest.raises(Refused, match=r"\(put_in_parts\), so nothing is written"):
        store.create("a", b"2")
    prefix = store.uri.removeprefix(f"s3://{BUCKET}/")
    assert not [key for key in objects(at_server) if key.startswith(prefix)]


def test_nothing_of_the_probe_is_left(store: S3Store, at_server: Server) -> None:
    store.create("a", b"1")
    store.create("b", b"1")
    prefix = store.uri.removeprefix(f"s3://{BUCKET}/")
    assert [key for key in objects(at_server) if key.startswith(prefix)] == [f"{prefix}/a", f"{prefix}/b"]
    assert "Uploads" not in client(at_server).list_multipart_uploads(Bucket=BUCKET, Prefix=f"{prefix}/.probe")


def test_what_killed_writers_left_is_removed_after_a_day(
    proxy: Proxy, store: S3Store, at_server: Server, tmp_path: Path
) -> None:
    plain, name = client(at_server), tmp_path.name
    for key in (f"{name}/.probe-old", f"{name}/.probe-young", f"{name}-other/.probe-old"):
        plain.put_object(Bucket=BUCKET, Key=key, Body=b"")
    for key in (f"{name}/old", f"{name}/young"):
        plain.create_multipart_upload(Bucket=BUCKET, Key=key)
    proxy.fault(years_old("old"), when=lambda request: request.method == "GET", times=ALWAYS)
    assert store.create("a", b"1")
    assert sorted(key for key in objects(at_server) if key.startswith(name)) == [
        f"{name}-other/.probe-old",
        f"{name}/.probe-young",
        f"{name}/a",
    ]
    uploads = plain.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in uploads if upload["Key"].startswith(name)] == [f"{name}/young"]
