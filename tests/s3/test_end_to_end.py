"""A run published to a real S3 server and audited from there alone: by the commands, and by the flows of Prefect."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flows import environment
from storage.ledger import HEADER_KEY
from storage.release import RELEASE_KEY
from tests.flows.conftest import ROOT, result, verbatim
from tests.s3.server import BUCKET, Server, client
from tests.s3.small_run import STEPS, address, content

REFERENCE = ("--backend", "reference")
STORE = address("undisturbed")


def test_what_is_published_is_the_run(undisturbed: dict[str, bytes], trained: Path) -> None:
    """Every file of the run and of its mix is there, byte for byte."""
    for prefix, folder in (("", trained / "run"), ("mix/", trained / "mix")):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = prefix + path.relative_to(folder).as_posix()
            if not key.startswith("lease/"):  # who trains it now
                assert undisturbed[key] == path.read_bytes(), key
    classes = json.loads(undisturbed[RELEASE_KEY])["body"]["classes"].values()
    assert undisturbed.keys() == {RELEASE_KEY}.union(*(group["objects"] for group in classes))


def test_the_commands(at_server: Server, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """From here on only the bucket is read; nothing in it changes."""
    said = result("verify", STORE)
    assert f"{STEPS} steps" in said[0]["says"]
    beacon = tmp_path / "beacon.json"
    beacon.write_text(json.dumps({"round": 1, "scheme": "file", "value": "07" * 32}, separators=(",", ":")))
    records = ("--records", tmp_path / "records")
    drew = result("sample", STORE, "--beacon", beacon, *records)
    drawn, date = drew["steps"][0], drew["date"]
    audits = [
        result("audit", STORE, "--initial", *REFERENCE, *records),
        result("audit", STORE, "--step", drawn, "--draw", date, *REFERENCE, *records),
    ]
    assert [audit["verdict"] for audit in audits] == ["match", "match"]
    said = result("verify", STORE, *(audit["certificate"] for audit in audits))
    assert [line["says"].split(",")[0] for line in said] == ["initial match", f"step {drawn} match"]
    assert all(piece["fits"] for piece in result("doctor", "--run", STORE))
    assert result("docs", STORE, "--step", drawn)
    assert content(at_server, "undisturbed") == undisturbed


def test_an_object_that_nobody_listed(at_server: Server, undisturbed: dict[str, bytes]) -> None:
    """Whoever may write into the bucket cannot pass it off as the release's."""
    name = {"Bucket": BUCKET, "Key": "undisturbed/mix/extra.bin"}
    client(at_server).put_object(**name, Body=b"1")
    try:
        assert "mix/extra.bin" in verbatim("verify", STORE, expect=11).stderr
    finally:
        client(at_server).delete_object(**name)


FLOWS = """
import sys
from flows import environment
environment.apply()
from flows.audit import audit
from flows.publish import publish
folder, target, records = sys.argv[1:]
release = publish(folder, target)
print(release.model_dump_json())
for step in (None, 3):
    print(audit(release.uri, step, "reference", records).model_dump_json())
"""


def test_the_flows(api: str, at_server: Server, trained: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """They leave their history with the server: states, progress, verdicts."""
    target = address(tmp_path.name)
    command = [sys.executable, "-c", FLOWS, str(trained), target, str(tmp_path / "records")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    release, *audits = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert release["uri"] == target and release["copied"] == release["objects"] == len(undisturbed) - 1
    assert [audit["verdict"] for audit in audits] == ["match", "match"]
    assert content(at_server, tmp_path.name) == undisturbed
    runs = asked(api, "flow_runs/filter", {"flow_runs": {}})
    ours = [run for run in runs if target in run["parameters"].values()]
    assert [run["state_type"] for run in ours] == ["COMPLETED"] * 3
    artifacts = asked(api, "artifacts/filter", {})
    of_ours = [artifact for artifact in artifacts if artifact["flow_run_id"] in {run["id"] for run in ours}]
    assert any(artifact["type"] == "progress" and "Publish" in artifact["description"] for artifact in of_ours)
    assert sum("MATCH" in str(artifact["data"]) for artifact in of_ours) == 2


def asked(api: str, what: str, filters: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{api}/{what}", json.dumps(filters).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.timeout(7200)
def test_the_demo(api: str, at_server: Server, tmp_path: Path) -> None:
    """The demo's own recipe: real text, 40 steps, 430 MB; three pieces of it audited from the bucket alone."""
    folder, records, store = tmp_path / "demo", ("--records", tmp_path / "records"), address("demo")
    for arguments in (("prepare", "demo"), ("train", "demo")):
        subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments, "--folder", str(folder)], cwd=ROOT, check=True, timeout=5400
        )
    verbatim("publish", folder, "--target", store)
    shutil.rmtree(folder)
    expected = json.loads((environment.PROJECT / "deployments/recipes/demo.expected.json").read_text(encoding="utf-8"))
    assert expected["trajectory_root"] in str(result("verify", store))
    header = json.loads(content(at_server, f"demo/{HEADER_KEY.rpartition('/')[0]}")["header.json"])
    assert header["mix_root"] == expected["mix_root"]
    for piece in (("--initial",), ("--step", "17"), ("--step", "36")):
        assert result("audit", store, *piece, *records)["verdict"] == "match"
