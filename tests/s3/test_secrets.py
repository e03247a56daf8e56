"""Keys, tokens and passwords stay where they were given: in the environment.

Every command runs with secrets that are nowhere else, with everything logged that can be, and results kept as pickles;
it succeeds, or fails in ways that tempt to tell too much. Then all that it left is searched.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from storage.store import S3Store
from tests.flows.conftest import command
from tests.s3.canary import Search, watched
from tests.s3.faults import ALWAYS, without_token
from tests.s3.proxy import Proxy, failing, gets, puts, stalling, wrong_answer
from tests.s3.server import BUCKET, Server
from tests.s3.small_run import address, content
from tests.s3.test_end_to_end import FLOWS

STORE = address("undisturbed")
LOUD = {
    "PREFECT_LOGGING_LEVEL": "DEBUG",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "botocore,botocore.auth,botocore.endpoint,urllib3,asyncio",
    "PREFECT_LOGGING_LOG_PRINTS": "true",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true",
    "PYTHONFAULTHANDLER": "1",
}


class Scene:
    """The server behind a proxy, a token, and the search for all that is secret."""

    def __init__(self, server: Server, proxy: Proxy, folder: Path) -> None:
        self.proxy, self.folder = proxy, folder
        self.token, self.password, self.other = (f"canary{secrets.token_hex(16)}" for _ in range(3))
        self.search = Search([server.secret, self.token, self.password, self.other])
        self.plain = {**os.environ, **LOUD, "AWS_SESSION_TOKEN": self.token}
        proxy.rewrite = without_token(server)  # SeaweedFS has no sessions

    def run(self, *arguments: str | Path, expect: int, interrupt: int = 0, **environment: str) -> str:
        """A command of the product; what it said on standard error."""
        return self.execute(command(*arguments), expect, interrupt, **environment)

    def execute(self, arguments: list[str], expect: int, interrupt: int = 0, **environment: str) -> str:
        status, errors = watched(arguments, self.search, self.plain | environment, interrupt, after=6)
        assert status == expect, errors
        return errors

    def with_password(self, port: int | str) -> str:
        return f"http://user:{self.password}@127.0.0.1:{port}"


@pytest.fixture
def scene(undisturbed: dict[str, bytes], at_server: Server, proxy: Proxy, tmp_path: Path) -> Scene:
    return Scene(at_server, proxy, tmp_path)


def test_the_search_finds(scene: Scene, tmp_path: Path) -> None:
    """Plain, in base64 at each offset, in a file, in a command line."""
    import base64

    search = Search([scene.token])
    for hidden in (scene.token.encode(), *(base64.b64encode(b"x" * n + scene.token.encode()) for n in range(3))):
        (tmp_path / "file").write_bytes(b"before " + hidden + b" after")
        before = len(search.found)
        search.folder(tmp_path)
        assert len(search.found) > before
    listed = Search([scene.token])
    child = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1)', '{scene.token}'])"
    )
    watched([sys.executable, "-c", child], listed, dict(os.environ))
    assert any("a command line" in found for found in listed.found)


def test_nothing_secret_is_left_anywhere(
    api: str, scene: Scene, trained: Path, at_server: Server, tmp_path: Path
) -> None:
    _succeed(scene, trained, tmp_path)
    _fail(scene, trained, tmp_path)
    search = scene.search
    search.api(api)
    search.folder(Path(os.environ["PREFECT_HOME"]))
    search.folder(tmp_path)
    search.folder(trained)
    for name in (tmp_path.name, "undisturbed"):
        for key, data in content(at_server, name).items():
            search.look(f"{name}/{key}", data)
    tokens = [r for r in scene.proxy.requests if scene.token in r.headers.values()]
    print(f"{search.places} places searched; {len(tokens)} requests with the token")
    assert tokens and search.places > 100
    assert not search.found, "\n".join(search.found)


def _succeed(scene: Scene, trained: Path, tmp_path: Path) -> None:
    audit = ("audit", STORE, "--step", "3", "--backend", "reference", "--records", tmp_path / "records")
    scene.run("publish", trained, "--target", address(tmp_path.name), expect=0)
    with_password = scene.with_password(scene.proxy.server_port)
    scene.run("verify", address(tmp_path.name), expect=0, AWS_ENDPOINT_URL_S3=with_password)
    scene.run(*audit, expect=0)
    scene.execute([sys.executable, "-c", FLOWS, str(trained), address(tmp_path.name), str(tmp_path / "kept")], 0)


def _fail(scene: Scene, trained: Path, tmp_path: Path) -> None:
    target = address(tmp_path.name + "-failed")
    commands: dict[str, tuple[str | Path, ...]] = {
        "publish": ("publish", trained, "--target", target),
        "verify": ("verify", STORE),
        "audit": ("audit", STORE, "--step", "3", "--backend", "reference", "--records", tmp_path / "records"),
    }
    in_address = f"s3://AKIAEXAMPLE:{scene.other}@{BUCKET}/run"
    for arguments in commands.values():
        for endpoint in (scene.with_password("port"), f"canary://{scene.password}", f"http://[{scene.password}"):
            scene.run(*arguments, expect=1, AWS_ENDPOINT_URL_S3=endpoint)
        scene.run(*(in_address if one in (STORE, target) else one for one in arguments), expect=2)
    straight = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{scene.proxy.upstream}"}
    assert "403" in scene.run(*commands["publish"], expect=1, AWS_SECRET_ACCESS_KEY=scene.other, **straight)
    for fault, when, name, code, says in (
        (failing(400, "ExpiredToken"), gets, "verify", 1, "ExpiredToken"),
        (failing(403, "AccessDenied"), puts, "publish", 1, "AccessDenied"),
        (wrong_answer, gets, "audit", 11, ""),  # which prints its verdict elsewhere
    ):
        scene.proxy.fault(fault, when=when, times=ALWAYS)
        assert says in scene.run(*commands[name], expect=code)
        scene.proxy.no_faults()
    scene.proxy.fault(stalling(60), times=ALWAYS)
    scene.run(*commands["publish"], expect=130, interrupt=signal.SIGINT)
    scene.proxy.no_faults()


def test_a_store_carries_no_keys_to_another_process(at_server: Server) -> None:
    """Before and after its first request; what cannot be pickled carries nothing either."""
    store = S3Store.open(STORE)
    search = Search([at_server.secret])
    for _ in range(2):
        with suppress(TypeError, pickle.PicklingError):
            search.look("a pickle", pickle.dumps(store))
        search.look("its text", repr(store) + repr(vars(store)) + repr(vars(store._bucket)))
        store.list("ledger/")
    assert search.places >= 3 and not search.found
