"""Signing keys: private to their owner, made once, signatures bound to their purpose."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from storage.audit.keys import load_or_create_key, verify_signature
from storage.errors import StorageError, UsageError


def test_made_once_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    key = load_or_create_key(folder, "trainer")
    assert stat.S_IMODE((folder / "trainer.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load_or_create_key(folder, "trainer").public == key.public
    assert load_or_create_key(folder, "auditor").public != key.public
    assert sorted(os.listdir(folder)) == ["auditor.key", "trainer.key"]


def test_signature_is_bound_to_key_data_and_purpose(tmp_path: Path) -> None:
    key, other = load_or_create_key(tmp_path, "a"), load_or_create_key(tmp_path, "b")
    signature = key.sign(b"data", "release")
    assert verify_signature(key.public, signature, b"data", "release")
    flipped = f"{int(signature[:2], 16) ^ 1:02x}" + signature[2:]
    for public, text, data, purpose in (
        (other.public, signature, b"data", "release"),
        (key.public, signature, b"Data", "release"),
        (key.public, signature, b"data", "certificate"),
        (key.public, flipped, b"data", "release"),
        (key.public, "", b"data", "release"),
        (key.public, "zz", b"data", "release"),
        ("zz", signature, b"data", "release"),
        ("0" * 64, signature, b"data", "release"),
    ):
        assert not verify_signature(public, text, data, purpose)


def _public(folder: Path, answers: "multiprocessing.Queue[str]") -> None:
    answers.put(load_or_create_key(folder, "k").public)


def test_processes_that_race_share_one_key(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_public, args=(tmp_path, answers)) for _ in range(4)]
    for child in children:
        child.start()
    assert len({answers.get(timeout=30) for _ in children}) == 1
    for child in children:
        child.join()
    assert os.listdir(tmp_path) == ["k.key"]


def test_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_or_create_key(tmp_path, "k")
    (tmp_path / "k.key").chmod(0o644)
    with pytest.raises(StorageError, match=r"mode 0644.*expected 0600"):
        load_or_create_key(tmp_path, "k")


def test_what_is_no_key(tmp_path: Path) -> None:
    rsa = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for number, content in enumerate((b"", b"junk", rsa)):
        path = tmp_path / f"k{number}.key"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(StorageError, match="key"):
            load_or_create_key(tmp_path, f"k{number}")
    for name in ("", "../k", "a/b", ".k", "a b"):
        with pytest.raises(UsageError):
            load_or_create_key(tmp_path, name)


def test_link_to_a_key_is_refused(tmp_path: Path) -> None:
    load_or_create_key(tmp_path, "k")
    (tmp_path / "link.key").symlink_to(tmp_path / "k.key")
    with pytest.raises(StorageError):
        load_or_create_key(tmp_path, "link")
