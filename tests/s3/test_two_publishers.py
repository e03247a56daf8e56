"""Two publishers of one address: of one run both end well; of two runs one does, and the other changes nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from storage.ledger import HEADER_KEY
from storage.release import RELEASE_KEY
from tests.flows.conftest import ROOT, command, verbatim
from tests.s3.faults import ALWAYS, Together, empty_listing, unlisted
from tests.s3.proxy import Proxy, completions, failing, gets, listings, puts
from tests.s3.server import BUCKET, Server, client
from tests.s3.small_run import address, content


def publish_at_once(name: str, *folders: Path) -> list[tuple[int, str]]:
    """(exit code, what it said on standard error) of a publisher for each of the folders."""
    pipe = subprocess.PIPE
    children = [
        subprocess.Popen(command("publish", folder, "--target", address(name)), cwd=ROOT, stdout=pipe, stderr=pipe)
        for folder in folders
    ]
    said = [child.communicate(timeout=240)[1].decode() for child in children]
    return [(child.returncode, text) for child, text in zip(children, said)]


def test_two_of_one_run(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path
) -> None:
    race = Together()
    proxy.fault(race, when=lambda request: puts(request) or completions(request), times=ALWAYS)
    done = publish_at_once(tmp_path.name, trained, trained)
    assert [code for code, _ in done] == [0, 0], done
    assert content(at_server, tmp_path.name) == undisturbed
    made = [(method, what) for method, what, status in race.answers if status == 200 and "/.probe-" not in what]
    assert {what for _, what in made} == {f"/{BUCKET}/{tmp_path.name}/{key}" for key in undisturbed}
    short = [what for method, what in made if method == "PUT"]
    assert len(short) == len(set(short)), "two were told that they created it"
    # Of long objects SeaweedFS may complete two uploads that end at one moment: so what claims a place is short.
    print(f"{race.met} of {len(undisturbed)} objects were written by both at one moment")
    assert race.met >= len(undisturbed) // 4
    verbatim("verify", address(tmp_path.name))


def test_a_release_that_another_finished_meanwhile(
    trained: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server
) -> None:
    """The second publisher began before the first had ended: it finds what it was about to write."""
    proxy.fault(failing(404, "NoSuchKey"), when=lambda request: gets(request) and RELEASE_KEY in request.path)
    proxy.fault(unlisted(RELEASE_KEY), when=listings)
    verbatim("publish", trained, "--target", address("undisturbed"))
    assert not proxy.faults_left and content(at_server, "undisturbed") == undisturbed


def test_two_runs_at_once(
    trained: Path, another: Path, undisturbed: dict[str, bytes], proxy: Proxy, at_server: Server, tmp_path: Path
) -> None:
    """Both find the address empty; the header that is first claims it."""
    race = Together(patience=60)
    proxy.fault(race, when=lambda request: puts(request) and request.path.endswith(HEADER_KEY), times=2)
    done = publish_at_once(tmp_path.name, trained, another)
    assert race.met == 1 and sorted(status for _, _, status in race.answers) == [200, 412]
    assert sorted(code for code, _ in done) == [0, 13], done
    loser = next(said for code, said in done if code)
    assert "does not hold run" in loser and "Traceback" not in loser
    now = content(at_server, tmp_path.name)
    assert (now == undisturbed) == (done[0][0] == 0)
    verbatim("verify", address(tmp_path.name))  # all that is there is listed, and of one run


@pytest.mark.parametrize("hidden", [False, True], ids=["listed", "behind a stale listing"])
@pytest.mark.parametrize("finished", [True, False], ids=["a release", "an unfinished one"])
def test_another_run_under_the_same_name(
    another: Path,
    undisturbed: dict[str, bytes],
    proxy: Proxy,
    at_server: Server,
    tmp_path: Path,
    finished: bool,
    hidden: bool,
) -> None:
    """Refused, also where the store does not yet list what is there; every object stays as it was."""
    before = {key: data for key, data in undisturbed.items() if finished or key < RELEASE_KEY}
    before |= {HEADER_KEY: undisturbed[HEADER_KEY]}
    for key, data in before.items():
        client(at_server).put_object(Bucket=BUCKET, Key=f"{tmp_path.name}/{key}", Body=data)
    if hidden:
        proxy.fault(empty_listing, when=listings, times=ALWAYS)
    refused = verbatim("publish", another, "--target", address(tmp_path.name), expect=13)
    assert "does not hold run" in refused.stderr
    now = content(at_server, tmp_path.name)
    assert now == before


def test_a_server_that_overwrites(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rclone's takes If-None-Match and does not heed it: the probe finds out, the command refuses."""
    from tests.s3.server import RCLONE, installed, rclone

    assert installed(*RCLONE).exists()
    with rclone(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        client(server).put_object(Bucket=BUCKET, Key="elsewhere/object", Body=b"1")
        for _ in range(2):  # not only the first time
            refused = verbatim("publish", trained, "--target", address("run"), expect=13)
            assert "this server overwrites objects that If-None-Match should keep" in refused.stderr
        assert [path.name for path in (tmp_path / "data" / BUCKET).rglob("*") if path.is_file()] == ["object"]
