"""Every test here needs a real S3 server, one for all of them; `make s3` runs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import s3_requests
from storage.store import S3Store
from tests.flows.conftest import api, verbatim  # noqa: F401  (a fixture: the Prefect server of the commands)
from tests.s3 import small_run
from tests.s3.proxy import Proxy, proxied
from tests.s3.server import BUCKET, Server, seaweedfs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.s3)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture
def at_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, named by the environment as for a person."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def store(at_server: Server, tmp_path: Path) -> S3Store:
    """An empty store on the server."""
    return S3Store.open(f"s3://{BUCKET}/{tmp_path.name}")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many attempts as always, closer together."""
    monkeypatch.setattr(s3_requests, "PAUSES", tuple(0.02 for _ in s3_requests.PAUSES))


@pytest.fixture
def proxy(at_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The way to the server from now on."""
    with proxied(at_server.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", between.endpoint)
        yield between


@pytest.fixture(scope="session")
def trained(api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The folder of a run that was prepared and trained by its commands."""
    return small_run.train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def another(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A different run over the same mix."""
    return small_run.train(tmp_path_factory.mktemp("another"), seed=8, mix=trained / "mix")


@pytest.fixture(scope="session")
def undisturbed(trained: Path, server: Server) -> dict[str, bytes]:
    """Every object of the run as published with nothing in the way; at small_run.address("undisturbed")."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        verbatim("publish", trained, "--target", small_run.address("undisturbed"))
    return small_run.content(server, "undisturbed")
