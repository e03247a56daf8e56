"""What a release holds: run, mix, records of audits, code. All of it, byte by byte, in its class, and nothing else."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from storage.audit.certificate import Beacon, save_certificate
from storage.audit.draw import Draw, draw_key
from storage.audit.keys import Key, load_or_create_key
from storage.audit.release import check_release
from storage.audit.replay import audit_step
from storage.audit.settle import settle
from storage.classes import CLASSES, MADE_CLASSES, class_of
from storage.code_archive import BESIDE, archive_key, code_of, pack, source_files, unpack
from storage.errors import CertificateFault, InputFault, Refused
from storage.ledger import Ledger
from storage.mirrors import open_copies
from storage.provenance import PROJECT, code_digest, lock_digest
from storage.publish import publish
from storage.release import RELEASE_KEY, ReleaseBody
from storage.store import LocalStore
from tests.storage import small
from tests.storage.conftest import Small
from tests.storage.drawn import BEACON, DATE, Known, at
from tests.storage.test_publish import everything
from tests.storage.test_release import signed

PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def auditor(tmp_path: Path) -> Key:
    return load_or_create_key(tmp_path / "auditor", "auditor")


@pytest.fixture
def records(made: Small, auditor: Key) -> LocalStore:
    """An auditor's: a draw, its beacon, a certificate; and a beacon that nothing was drawn from."""
    kept, ledger = LocalStore(made.folder / "records"), made.run().ledger
    draw = drawn(kept, ledger, made.key)
    kept.create(f"beacons/{DATE}.json", BEACON.canonical())
    kept.create("beacons/2026-11-30.json", BEACON.canonical())
    data = audit_step(made.published, draw.steps[0], "cpu", auditor, draw).certificate
    assert data
    save_certificate(kept, data)
    return kept


def drawn(records: LocalStore, ledger: Ledger, key: Key, beacon: Beacon = BEACON) -> Draw:
    """A draw of one step."""
    return settle(records, ledger, key, Known(beacon), 1, at(DATE)).draws[DATE]


def held(body: ReleaseBody) -> dict[str, tuple[int, int]]:
    return {name: (group.count, group.bytes) for name, group in body.classes.items()}


def test_a_release_is_run_mix_records_and_code_and_nothing_else(
    made: Small, records: LocalStore, tmp_path: Path
) -> None:
    """Both ways: each object of the sources is there, and whatever is there is one of them or is made from them."""
    target = LocalStore(tmp_path / "target")
    body = publish(made.store, made.mix, target, made.key, records).release
    found = everything(target)
    mix = {f"mix/{key}": data for key, data in everything(made.mix).items() if not key.startswith("parts/")}
    run = {key: data for key, data in everything(made.store).items() if not key.startswith("lease/")}
    kept = {f"audits/{key}": data for key, data in everything(records).items() if "2026-11-30" not in key}
    sources = mix | run | kept
    ours = {key: data for key, data in found.items() if class_of(key) in MADE_CLASSES}
    assert found == sources | ours | {RELEASE_KEY: target.read(RELEASE_KEY)}
    assert body.objects.keys() == found.keys() - {RELEASE_KEY} and not sources.keys() & ours.keys()
    assert check_release(target).body == body


def test_each_class_is_listed_with_its_objects_and_bytes(made: Small, records: LocalStore, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    body = publish(made.store, made.mix, target, made.key, records).release
    expected = {name: (0, 0) for name in CLASSES}
    for key, data in everything(target).items():
        if key != RELEASE_KEY:
            count, size = expected[class_of(key)]
            expected[class_of(key)] = count + 1, size + len(data)
    assert held(body) == expected
    assert {name for name, (count, _) in expected.items() if not count} == {"witnesses", "disputes", "evaluations"}
    numbers = {
        "ledger": 13,
        "digests": 12,
        "probe": 4,
        "segments": 2,
        "statements": 1,
        "draws": 1,
        "beacons": 1,
        "certificates": 1,
    }
    assert {name: expected[name][0] for name in numbers} == numbers


@pytest.mark.parametrize("key", ["notes.txt", "mix/windows/nouns/train/00009.arrow", "export/extra.py", "a/b"])
def test_an_object_beside_the_list_is_found(made: Small, key: str) -> None:
    made.published.create(key, b"planted")
    with pytest.raises(InputFault, match=f"holds {key}, which RELEASE.json does not list"):
        check_release(made.published)


def test_an_object_beside_the_list_is_found_in_each_copy(made: Small) -> None:
    """Reading takes what is listed from whichever copy has it; verifying looks at what each of them holds."""
    second = LocalStore(made.folder / "second")
    shutil.copytree(made.published.root, second.root)
    copies = [made.published.uri, second.uri]
    assert check_release(open_copies(copies, cached=False)).body.steps == 12
    second.create("notes.txt", b"planted")
    with pytest.raises(InputFault, match=f"{second.uri} holds notes.txt"):
        check_release(open_copies(copies, cached=False))


@pytest.mark.parametrize("key", ["notes.txt", "index.html", "objects/short", "digests/3.json"])
def test_a_foreign_file_in_a_run_is_not_published(made: Small, tmp_path: Path, key: str) -> None:
    made.store.create(key, b"planted")
    with pytest.raises(InputFault, match=f"{key} belongs to no class of objects that a release holds"):
        publish(made.store, made.mix, LocalStore(tmp_path / "target"), made.key)
    assert not (tmp_path / "target").exists()


def test_a_foreign_file_in_a_mix_is_not_published(made: Small, tmp_path: Path) -> None:
    made.mix.create("windows/nouns/train/00009.arrow", b"planted")
    with pytest.raises(InputFault, match="belongs to no class"):
        publish(made.store, made.mix, LocalStore(tmp_path / "target"), made.key)


def test_a_foreign_file_in_the_target_is_refused_before_anything_is_written(made: Small, tmp_path: Path) -> None:
    target = LocalStore(tmp_path / "target")
    target.create("ledger/header.json", made.store.read("ledger/header.json"))
    target.create("code/" + "0" * 64 + ".tar", b"of another version")
    before = everything(target)
    with pytest.raises(Refused, match=r"holds code/0000.*\.tar, which this publication does not"):
        publish(made.store, made.mix, target, made.key)
    assert everything(target) == before


def test_parts_that_an_interrupted_save_left_stay_out(made: Small, tmp_path: Path) -> None:
    made.store.create("objects/" + "0" * 64, b"half a checkpoint")
    target = LocalStore(tmp_path / "target")
    publish(made.store, made.mix, target, made.key)
    assert everything(target) == everything(made.published)


@pytest.mark.parametrize("count", [74, 82, 84, 86])
def test_killed_among_records_and_code_and_repeated(
    made: Small, records: LocalStore, tmp_path: Path, count: int
) -> None:
    target, whole = LocalStore(tmp_path / "target"), LocalStore(tmp_path / "whole")
    child = os.fork()
    if child == 0:
        small.die_at_link(count, lambda: publish(made.store, made.mix, target, made.key, records))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    publish(made.store, made.mix, target, made.key, records)
    publish(made.store, made.mix, whole, made.key, records)
    assert everything(target) == everything(whole)


def test_records_of_other_runs_stay_out(made: Small, records: LocalStore, auditor: Key, tmp_path: Path) -> None:
    other = Small(tmp_path / "other")
    small.begin(other.folder, other.store, other.mix, seed=8)
    other.train()
    publish(other.store, other.mix, other.published, other.key)
    drawn(records, other.run().ledger, other.key, Beacon(scheme="file", round=2, value="cd" * 32))
    data = audit_step(other.published, 3, "cpu", auditor).certificate
    assert data
    save_certificate(records, data)
    theirs = publish(other.store, other.mix, LocalStore(tmp_path / "b"), other.key, records).release
    ours = publish(made.store, made.mix, LocalStore(tmp_path / "a"), made.key, records).release
    counts = [
        [body.classes[name].count for name in ("statements", "draws", "beacons", "certificates")]
        for body in (ours, theirs)
    ]
    assert counts == [[1, 1, 1, 1], [1, 1, 0, 1]]


def test_a_forged_record_is_not_published(made: Small, records: LocalStore, auditor: Key, tmp_path: Path) -> None:
    (key,) = records.list("certificates/")
    data = records.path(key).read_bytes()
    records.path(key).write_bytes(data.replace(b'"round":7', b'"round":8'))
    with pytest.raises(CertificateFault, match="the signature is not that of key"):
        publish(made.store, made.mix, LocalStore(tmp_path / "a"), made.key, records)
    records.path(key).write_bytes(data)
    draw = records.path(draw_key(made.run().ledger.run_id, DATE))
    draw.write_bytes(re.sub(rb'"steps":\[(\d+)\]', lambda m: b'"steps":[%d]' % (11 - int(m[1])), draw.read_bytes()))
    with pytest.raises(InputFault, match="its steps do not follow from head and beacon"):
        publish(made.store, made.mix, LocalStore(tmp_path / "b"), made.key, records)


def test_a_strangers_record_is_no_part_of_a_release(made: Small, records: LocalStore) -> None:
    made.published.create("audits/beacons/2026-11-30.json", records.read("beacons/2026-11-30.json"))
    with pytest.raises(InputFault, match=r"audits/beacons/2026-11-30.json is no record of an audit of run"):
        check_release(signed(made))


def test_the_archive_is_the_code_and_what_installs_it(made: Small) -> None:
    body = check_release(made.published).body
    assert (body.code, body.lock) == (code_digest(), lock_digest()) and body.declared_code and body.declared_lock
    data = made.published.read(archive_key(body.code))
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        names = tar.getnames()
        assert {m.mtime for m in tar} == {0} and {(m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, "", "")}
        for name in names:
            file = tar.extractfile(name)
            assert file and file.read() == (PROJECT / name).read_bytes()
    kinds = (".py", ".json", ".html", ".css", ".js")
    sources = {p.relative_to(PROJECT).as_posix() for name in ("flows", "tasks", "kernels", "model", "storage")
               for p in (PROJECT / name).rglob("*") if p.suffix in kinds}  # fmt: skip
    recipes = {f"deployments/recipes/{p.name}" for p in (PROJECT / "deployments" / "recipes").iterdir()}
    assert names == sorted(sources | recipes | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"})
    shutil.unpack_archive(made.published.path(archive_key(body.code)), made.folder / "code", "tar")
    ask = "from storage.provenance import code_digest, lock_digest; print(code_digest(), lock_digest())"
    said = subprocess.run(
        [sys.executable, "-c", ask], cwd=made.folder / "code", env=PLAIN, capture_output=True, text=True
    )
    assert said.stdout.split() == [body.code, body.lock], said.stderr
    assert pack(source_files()) == data == pack(dict(reversed(source_files().items())))


def test_code_that_was_not_the_runs_is_labelled(made: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = source_files() | {"storage/made.py": b"# mended since\n"}
    monkeypatch.setattr("storage.made.source_files", lambda: files)
    target = LocalStore(tmp_path / "target")
    body = publish(made.store, made.mix, target, made.key).release
    assert body.code == code_of(files) != made.run().ledger.header.code
    assert (body.declared_code, body.declared_lock) == (False, True)
    assert check_release(target).body == body
    with pytest.raises(InputFault, match="its word on the code is True, the ledger's is False"):
        shutil.rmtree(made.published.root)
        shutil.copytree(target.root, made.published.root)
        check_release(signed(made, declared_code=True))


def test_another_archive_under_the_codes_name(made: Small) -> None:
    key = archive_key(code_digest())
    made.published.path(key).write_bytes(pack(source_files() | {"storage/made.py": b"import os\n"}))
    with pytest.raises(InputFault, match=rf"{key}: its code is .*, RELEASE.json says {code_digest()}"):
        check_release(signed(made))
    made.published.path(key).write_bytes(pack(source_files() | {"constraints.txt": b"torch==0\n"}))
    with pytest.raises(InputFault, match=rf"{key}: its lock is .*, RELEASE.json says {lock_digest()}"):
        check_release(signed(made))


def _tar(name: str, *, kind: bytes = tarfile.REGTYPE, mtime: int = 0, form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        member = tarfile.TarInfo(name)
        member.type, member.mode, member.mtime, member.size = kind, 0o644, mtime, 2 if kind == tarfile.REGTYPE else 0
        tar.addfile(member, BytesIO(b"x\n"))
    return buffer.getvalue()


def _resized(size: bytes) -> bytes:
    """An archive whose member says that it has so many bytes."""
    data = bytearray(_tar("a.py"))
    data[124:136], data[148:156] = size, b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        *(_tar(name) for name in ("../up.py", "/etc/passwd", "a/../b", ".hidden", "a//b", "a\nb")),
        *(_tar("a.py", kind=kind) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)),
        _tar("a.py", mtime=1),
        _tar("é.py", form=tarfile.PAX_FORMAT),
        _tar("a.py")[:700],
        _tar("a.py") + bytes(512),
        _resized(b"\x80" + b"\xff" * 11),
        b"not a tar",
        b"",
    ],
)
def test_an_archive_that_is_not_ours_is_not_unpacked(data: bytes) -> None:
    with pytest.raises(InputFault, match=r"^code.tar: "):
        unpack(data, "code.tar")


def test_an_archive_gives_its_files_back() -> None:
    files = {"b.py": b"", "a/c.json": bytes(range(256)) * 40}
    assert unpack(pack(files), "code.tar") == files and unpack(pack({}), "code.tar") == {}
    assert set(BESIDE) < source_files().keys()


def test_a_certificate_under_another_name(made: Small, records: LocalStore) -> None:
    """Names must not hide that one record is there twice."""
    (key,) = records.list("certificates/")
    records.path(key).rename(records.path("certificates/step-1-other.json"))
    with pytest.raises(CertificateFault, match="the file was renamed"):
        publish(made.store, made.mix, LocalStore(made.folder / "target"), made.key, records)


@pytest.mark.parametrize("name", ["evil", "2026-99-99", f"below/{DATE}"])
def test_a_draw_that_is_not_named_by_its_date_is_a_fault(made: Small, records: LocalStore, name: str) -> None:
    key = draw_key(made.run().ledger.run_id, DATE)
    records.create(key.replace(DATE, name), records.read(key))
    with pytest.raises(InputFault, match=name):
        publish(made.store, made.mix, LocalStore(made.folder / "target"), made.key, records)
