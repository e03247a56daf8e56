"""What a server refuses is told in one sentence; keys are told to nobody."""

import itertools
import logging
import traceback

import pytest

from storage.errors import MissingObject, StorageError, VerbatimError
from storage.store import S3Store
from tests.s3.proxy import Proxy, failing, gets, puts
from tests.s3.server import BUCKET, Server, client


def test_a_wrong_secret(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-of-another")
    for call in (lambda: store.create("k", b""), lambda: store.read("k"), store.list, lambda: store.delete("k")):
        with pytest.raises(StorageError, match="403 SignatureDoesNotMatch") as caught:
            call()
        assert "the secret key does not belong to the key id" in str(caught.value) and not caught.value.__cause__
    with pytest.raises(StorageError, match="403") as caught:  # the answer to a HEAD has no code
        store.size("k")
    assert "canary" not in str(caught.value)


def test_an_unknown_key_id(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StorageError, match="403 InvalidAccessKeyId") as caught:
        store.read("k")
    assert "set AWS_ACCESS_KEY_ID" in str(caught.value)


def test_no_keys_read_what_is_public_and_nothing_else(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("k", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    without = S3Store.open(store.uri)
    with pytest.raises(StorageError, match="403 AccessDenied") as caught:
        without.read("k")
    assert "no keys were found" in str(caught.value)


def test_no_server(store: S3Store, monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for call in (lambda: store.create("k", b""), lambda: store.read("k"), lambda: store.size("k"), store.list):
        with pytest.raises(StorageError, match="EndpointConnectionError, after 8 attempts") as caught:
            call()
        assert "AWS_ENDPOINT_URL_S3 is wrong" in str(caught.value)


def test_an_address_that_is_none(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "canary")
    with pytest.raises(StorageError, match="no connection can be set up: ValueError") as caught:
        store.read("k")
    assert "canary" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("fresh", [True, False])
def test_a_listing_without_end(store: S3Store, monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    """Each page promises another: by ever new tokens, or by the same one."""
    numbers = itertools.count()

    def answer(operation: str, key: str, **given: object) -> dict[str, object]:
        return {"IsTruncated": True, "NextContinuationToken": f"{next(numbers) if fresh else 0}"}

    monkeypatch.setattr(store, "_send", answer)
    monkeypatch.setattr("storage.s3.MAX_PAGES", 50)
    with pytest.raises(StorageError, match="lists objects below 'a/' without end: 0 so far"):
        store.list("a/")
    assert next(numbers) == (50 if fresh else 0)


def test_no_permission_to_write(proxy: Proxy, store: S3Store) -> None:
    proxy.fault(failing(403, "AccessDenied"), when=puts)
    with pytest.raises(StorageError, match="403 AccessDenied") as caught:
        store.create("k", b"1")
    assert "these keys may not do this here" in str(caught.value)
    proxy.fault(failing(501, "NotImplemented"), when=puts)
    with pytest.raises(StorageError, match="501 NotImplemented"):
        store.create("k", b"1")
    assert store.list() == []


def test_who_may_not_delete_can_write(proxy: Proxy, store: S3Store, at_server: Server) -> None:
    proxy.fault(failing(403, "AccessDenied"), when=lambda request: request.method == "DELETE", times=9)
    assert store.create("k", b"1") and store.list() == ["k"]
    prefix = store.uri.removeprefix(f"s3://{BUCKET}/")
    found = client(at_server).list_objects_v2(Bucket=BUCKET, Prefix=prefix + "/")["Contents"]
    assert len(found) == 2  # the other one is the probe's, which no listing of the store shows


def everything(error: BaseException | None) -> str:
    """All that an exception says, also what a debugger or a logger would show of those behind it."""
    said = ""
    while error is not None:
        said += "".join(traceback.format_exception(error)) + repr(vars(error))
        error = error.__cause__ or error.__context__
    return said


def test_keys_are_in_no_log_and_no_exception(
    proxy: Proxy, store: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    """Not even where everything is logged."""
    caplog.set_level(logging.DEBUG)
    for name in ("botocore", "botocore.auth", "botocore.endpoint", "urllib3"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    said = ""
    store.create("k", b"1" * (9 << 20))
    store.read("k")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-token")
    with_token = S3Store.open(store.uri)
    for fault in (failing(403, "AccessDenied"), failing(500, "InternalError"), failing(400, "ExpiredToken")):
        proxy.no_faults()
        proxy.fault(fault, when=gets, times=99)
        for one in (store, with_token):
            with pytest.raises(VerbatimError) as caught:
                one.read("k")
            said += everything(caught.value)
    proxy.no_faults()
    with pytest.raises(MissingObject) as missing:
        store.read("no")
    said += everything(missing.value) + caplog.text
    secret = [r.headers["Authorization"] for r in proxy.requests]
    assert any(r.headers.get("x-amz-security-token", r.headers.get("X-Amz-Security-Token")) for r in proxy.requests)
    assert "canary" not in said and "Signature=" not in said and secret[0] not in said and "InternalError" in said
