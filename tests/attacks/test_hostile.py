"""A hostile file in every position that an audit reads: nothing of it runs, is unpacked, or is followed anywhere."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from kernels import canonical
from storage import checkpoint
from storage.audit import certificate, dispute
from storage.audit.beacon import read_beacon
from storage.audit.collect import Evidence, collect
from storage.audit.keys import Key, load_or_create_key
from storage.audit.opened import opening_key
from storage.audit.opening import load_opening
from storage.audit.pieces import audit_piece
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.verdict import Outcome
from storage.beside import digests_key
from storage.errors import CertificateFault, InputFault, StorageError, UsageError
from storage.ledger import HEADER_KEY, part_key
from storage.provenance import PROJECT
from storage.release import PURPOSE, RELEASE_KEY, Object, Release
from storage.store import LocalStore
from tests.attacks import INPUT_FAULT, scene
from tests.attacks.scene import AT
from tests.storage.conftest import Small
from tests.storage.opened import drawn

MARKER = "a-stranger-was-here"
PARTS = ("unit 0", "sum", "update")


def _zip() -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../" + MARKER, bytes(32 << 20))
    return packed.getvalue()


PAYLOADS = {
    "a pickle": b"cos\nsystem\n(S'touch " + MARKER.encode() + b"'\ntR.",
    "a zip bomb with a path": _zip(),
    "a gzip bomb": gzip.compress(bytes(32 << 20)),
    "a giant header": (1 << 62).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[9223372036854775807]}}',
    "an Arrow file without an end": b"ARROW1\0\0" + b"\xff\xff\xff\x7f" * 16 + b"ARROW1",
    "JSON nested without end": b"[" * 100_000,
    "an endless number": b"9" * 100_000,
    "a path": b'{"objects":{"../../../../etc/passwd":{"digest":"","size":1}}}',
    "nothing": b"",
}


@pytest.fixture(scope="module")
def copy(honest: Small, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("hostile") / "copy"
    shutil.copytree(honest.folder, folder)
    return Small(folder)


@pytest.fixture(scope="module")
def positions(copy: Small) -> dict[str, str]:
    """What an audit of step AT reads, by name."""
    store = copy.published
    manifest = checkpoint.load_manifest(store, copy.release().ledger, 5)
    mix = store.list("mix/windows/")
    return {
        "header": HEADER_KEY,
        "entry": part_key(AT),
        "release": RELEASE_KEY,
        "manifest of the mix": "mix/manifest.json",
        "checkpoint": checkpoint.checkpoint_key(5),
        "tensors": f"objects/{manifest.parts[0].digest}",
        "leaves of tensors": f"objects/{manifest.leaves}",
        "windows": next(key for key in mix if "/train/" in key and key.endswith(".arrow")),
    }


def verdicts(store: LocalStore, auditor: Key) -> set[tuple[Outcome, str]]:
    """Of steps 5 to 7, which together read every shard."""
    found = [audit_step(store, step, "cpu", auditor) for step in (5, 6, 7)]
    return {(verdict.outcome, verdict.fault) for verdict in found}


@pytest.mark.parametrize("payload", scene.quick(PAYLOADS, "a pickle", "a giant header"))
def test_a_hostile_file(
    copy: Small,
    positions: dict[str, str],
    auditor: Key,
    payload: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ends: Callable[[str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, key in positions.items():
        path = copy.published.path(key)
        good = path.read_bytes()
        path.write_bytes(PAYLOADS[payload])
        began, found = time.monotonic(), verdicts(copy.published, auditor)
        path.write_bytes(good)
        assert {outcome for outcome, _ in found} <= {Outcome.INPUT_FAULT, Outcome.MATCH}, name
        assert Outcome.INPUT_FAULT in {outcome for outcome, _ in found}, name
        assert time.monotonic() - began < 60, name
    assert not list(tmp_path.rglob(MARKER)) and not list(copy.folder.rglob(MARKER))
    assert verdicts(copy.published, auditor) == {(Outcome.MATCH, "")}
    ends(INPUT_FAULT)


@pytest.mark.parametrize("payload", scene.quick(PAYLOADS, "a pickle", "a giant header"))
def test_a_hostile_opening(
    opened: Small,
    auditor: Key,
    payload: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ends: Callable[[str], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(opened.folder, tmp_path / "run")
    made = Small(tmp_path / "run")
    opening, draw = load_opening(made.release(), AT).opening, drawn(made)
    manifest = checkpoint.load_manifest(made.opened, made.release().ledger, AT)
    names = (opening.fingerprints, opening.gradient, manifest.leaves, manifest.parts[0].digest)
    for key in (opening_key(AT), checkpoint.checkpoint_key(AT), *map(checkpoint.object_key, names)):
        path = made.opened.path(key)
        good = path.read_bytes()
        path.write_bytes(PAYLOADS[payload])
        found = {audit_piece(made.published, f"step {AT} {part}", draw, "cpu", auditor).outcome for part in PARTS}
        path.write_bytes(good)
        assert Outcome.INPUT_FAULT in found and found <= {Outcome.INPUT_FAULT, Outcome.MATCH}, key
    assert not list(tmp_path.rglob(MARKER))
    found = {audit_piece(made.published, f"step {AT} {part}", draw, "cpu", auditor).outcome for part in PARTS}
    assert found == {Outcome.MATCH}
    ends(INPUT_FAULT)


@pytest.mark.parametrize("payload", scene.quick(PAYLOADS, "a pickle", "a giant header"))
def test_a_hostile_record(
    copy: Small, payload: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: Callable[[str], None]
) -> None:
    """In every folder of records that a reader collects from."""
    monkeypatch.chdir(tmp_path)
    ledger, store = copy.release().ledger, LocalStore(tmp_path / "records")
    run = ledger.run_id[:16]
    places = [f"{folder}/{run}/2026-11-29.json" for folder in ("statements", "witnesses", "draws")]
    for key in (*places, "certificates/x.json", "disputes/x.json"):
        store.create(key, PAYLOADS[payload])
        found = collect([store], ledger)
        assert list(found.faulty) == [f"{store.uri}: {key}"]
        assert found == Evidence(faulty=found.faulty, found_in={store.uri: 1})
        store.delete(key)
    assert not list(tmp_path.rglob(MARKER)) and collect([store], ledger) == Evidence(found_in={store.uri: 0})
    ends("told, and counts for nothing")


def link_to_the_genuine(path: Path, good: Path) -> None:
    path.symlink_to(good)


def endless_link(path: Path, good: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path, good: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, good: Path) -> None:
    path.mkdir()


PLACES = {place.__name__: place for place in (link_to_the_genuine, endless_link, pipe, folder)}


@pytest.mark.parametrize("name_of_place", scene.quick(PLACES, "endless_link"))
def test_a_link_pipe_or_folder_in_place_of_a_file(
    copy: Small,
    positions: dict[str, str],
    auditor: Key,
    name_of_place: str,
    tmp_path: Path,
    ends: Callable[[str], None],
) -> None:
    """It is never followed, not even to the genuine bytes. What a listing finds is then simply not there."""
    place = PLACES[name_of_place]
    listed = {"header": Outcome.REFUSED, "entry": Outcome.INPUT_FAULT, "checkpoint": Outcome.MATCH}
    for name, key in positions.items():
        path, good = copy.published.path(key), tmp_path / name
        path.rename(good)
        place(path, good)
        found = {outcome for outcome, _ in verdicts(copy.published, auditor)}
        path.rmdir() if place is folder else path.unlink()
        good.rename(path)
        assert listed.get(name, Outcome.INPUT_FAULT) in found, name
        assert found <= {listed.get(name, Outcome.INPUT_FAULT), Outcome.MATCH}, name
    ends(INPUT_FAULT)


def test_a_release_that_names_files_outside(copy: Small, tmp_path: Path, ends: Callable[[str], None]) -> None:
    """Signed by the trainer himself."""
    shutil.copytree(copy.published.root, tmp_path / "release")
    store = LocalStore(tmp_path / "release")
    body = Release.parse(store.read(RELEASE_KEY), RELEASE_KEY).body
    check_release(store)
    for key in ("../../secret", "/etc/passwd", "a//b", ".", "x/../../y"):
        name, group = next(iter(body.classes.items()))
        members = group.objects | {key: Object(digest="0" * 64, size=3)}
        more = group.model_copy(update={"count": group.count + 1, "bytes": group.bytes + 3, "objects": members})
        outside = body.model_copy(update={"classes": body.classes | {name: more}})
        signed = {"body": outside.document(), "signature": copy.key.sign(outside.canonical(), PURPOSE)}
        store.path(RELEASE_KEY).write_bytes(canonical.dumps(signed))
        with pytest.raises(InputFault):
            check_release(store)
    ends(INPUT_FAULT)


@pytest.mark.parametrize("payload", scene.quick(PAYLOADS, "a pickle", "a giant header"))
def test_a_hostile_file_that_a_person_names(
    copy: Small, payload: str, tmp_path: Path, ends: Callable[[str], None]
) -> None:
    """A certificate, a dispute, a beacon, a signing key."""
    data, ledger, path = PAYLOADS[payload], copy.release().ledger, tmp_path / "x.key"
    with pytest.raises(CertificateFault):
        certificate.verify(data, ledger)
    with pytest.raises(CertificateFault):
        dispute.read(data, ledger)
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises((InputFault, UsageError)):  # the latter for a file that is too long to be one
        read_beacon(path)
    with pytest.raises(StorageError):
        load_or_create_key(tmp_path, "x")
    ends(INPUT_FAULT)


def test_nested_json_is_an_error_after_a_beacon_was_checked() -> None:
    """The library of its curves would let a stranger's JSON overflow the stack and end the process."""
    command = (
        "import sys; from kernels import canonical; from storage.audit import drand\n"
        "before = sys.getrecursionlimit(); drand._genuine(1, '8' + '0' * 95)\n"
        "assert 'py_ecc' in sys.modules and sys.getrecursionlimit() == before\n"
        "try: canonical.loads(b'[' * 100_000)\n"
        "except canonical.NotCanonical: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=PROJECT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_digests_that_a_match_does_not_need(copy: Small, auditor: Key) -> None:
    path = copy.published.path(digests_key(AT))
    good = path.read_bytes()
    for data in PAYLOADS.values():
        path.write_bytes(data)
        assert audit_step(copy.published, AT, "cpu", auditor).outcome is Outcome.MATCH
    path.write_bytes(good)
