"""Ed25519 signing keys: one file each, readable by its owner only, made at first use.

A signature is bound to its purpose ("release", "certificate"), so that one can never be passed off as another.
"""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from kernels.digest import digest
from storage.errors import Refused, StorageError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_MAX_FILE = 4096


class Key:
    """A private signing key; `public` is its public half, 64 hex digits."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()

    def sign(self, data: bytes, purpose: str) -> str:
        """Signature of `data` for one purpose, 128 hex digits."""
        return self._private.sign(_message(data, purpose)).hex()


def verify_signature(public: str, signature: str, data: bytes, purpose: str) -> bool:
    """Whether `signature` is that key's signature of `data` for this purpose; False for anything malformed too."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _message(data, purpose))
    except (InvalidSignature, ValueError):
        return False
    return True


def load_or_create_key(folder: Path, name: str) -> Key:
    """The key `<name>.key` of the folder, made if there is none.

    Raises StorageError if others can read the file, or it is no such key; UsageError for a name that is none.
    """
    path = _path(folder, name)
    with _told(path):
        if not path.exists():
            _create(path)
        return _load(path)


def load_key(folder: Path, name: str) -> Key:
    """The key `<name>.key` of the folder; Refused, and nothing made, if there is none. Raises as load_or_create_key."""
    path = _path(folder, name)
    with _told(path):
        if not path.exists():
            raise Refused(
                f"there is no key {path}: what was asked needs the {name} of this very run",
                cause="another key folder than in training, or another's run",
                next_step="name the folder of the key that the run was begun with; nothing was written",
            )
        return _load(path)


def _path(folder: Path, name: str) -> Path:
    if not _NAME.match(name):
        raise UsageError(f"key name {name!r}: letters, digits, '-' and '_' are allowed")
    return folder / f"{name}.key"


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", next_step="choose a key folder that you own") from error


def _create(path: Path) -> None:
    """Write a new key under a temporary name, then link it: two processes that race end up with one key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    temporary = path.parent / f".tmp-{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as stream:
            stream.write(pem)
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()


def _load(path: Path) -> Key:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe without a writer must not be waited for
    with os.fdopen(file, "rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise _no_key(path, "it is not a regular file")
        if mode & 0o077:
            raise StorageError(
                f"{path} has mode {stat.S_IMODE(mode):04o}: others can use this private key; expected 0600",
                next_step=f"chmod 600 {path}; if others may have read it, delete it and begin with a new key",
            )
        pem = stream.read(_MAX_FILE)
    try:
        private = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _no_key(path, f"{len(pem)} bytes: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise _no_key(path, f"it is a key of another kind, {type(private).__name__}")
    return Key(private)


def _no_key(path: Path, why: str) -> StorageError:
    return StorageError(
        f"{path} is not an Ed25519 private key: {why}",
        cause="it was copied in part, or another program's file has this name",
        next_step="restore it from a copy; a new key would be another signer",
    )


def _message(data: bytes, purpose: str) -> bytes:
    return bytes.fromhex(digest(data, f"signature {purpose}"))
