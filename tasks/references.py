"""What tasks hand to each other: addresses and digests, a few hundred bytes. Data never passes through Prefect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict

from storage.provenance import PROJECT

CACHE = PROJECT / "runs" / "cache" / "sources"  # downloads, by their SHA-256; safe to delete
KEYS = PROJECT / "runs" / "keys"  # this machine's signing keys
AUDITS = PROJECT / "runs" / "audits"  # its draws and certificates


class Places(BaseModel):
    """The folders of one run on this machine."""

    model_config = ConfigDict(frozen=True)

    root: Path

    @classmethod
    def of(cls, folder: str) -> Self:
        """Relative folders are the project's, wherever a worker happens to run."""
        return cls(root=PROJECT / folder)

    @property
    def name(self) -> str:
        """The run's, for people."""
        return self.root.name

    @property
    def mix(self) -> str:
        """Windows, documents' index, tokenizer, manifest."""
        return str(self.root / "mix")

    @property
    def rebuilt_mix(self) -> str:
        """A second copy of the mix, made only to compare it."""
        return str(self.root / "rebuilt-mix")

    @property
    def run(self) -> str:
        """Ledger, checkpoints, segment records."""
        return str(self.root / "run")

    @property
    def published(self) -> str:
        """A copy for strangers, from which alone every audit works."""
        return str(self.root / "published")

    @property
    def audits(self) -> str:
        """What this machine drew and signed."""
        return str(self.root / "audits")


def places(recipe: str, folder: str = "") -> Places:
    """The folders of a recipe's run."""
    return Places.of(folder or f"runs/{Path(recipe).stem}")


class Reference(BaseModel):
    """Base of all references: frozen and small."""

    model_config = ConfigDict(frozen=True)


class Mix(Reference):
    """A prepared mix."""

    uri: str
    mix_root: str
    held_out_root: str
    windows: int


class Segment(Reference):
    """One stretch of training: steps first_step up to, not including, end_step. slow: of which of several processes the
    others had to wait for, "" of none."""

    first_step: int
    end_step: int
    validated: list[int]
    seconds: float
    head: str
    slow: str = ""


class Trained(Reference):
    """A run that has reached `steps`."""

    uri: str
    steps: int
    ledger_head: str
    trajectory_root: str


class Published(Reference):
    """A release: a whole run under one address."""

    uri: str
    run_id: str
    steps: int
    objects: int
    copied: int
    size: int


class Audited(Reference):
    """One audit's outcome; `certificate` is the key of the signed certificate in the records, if there is one.

    bad_copies: how many objects had to be taken from another store than the first, or could not be had at all.
    """

    piece: str
    step: int | None
    verdict: str
    exit_code: int
    detail: str
    seconds: float
    certificate: str | None
    bad_copies: int


class Scored(Reference):
    """How a state did on tasks: the mean share of right answers, what it is of, and where the signed record lies."""

    step: int
    state: str
    mean: float
    averaged: str
    record: str


def absolute(address: str) -> str:
    """An address as it is; a relative folder is the project's."""
    return address if "://" in address else str(PROJECT / address)


def records_of(records: str) -> str:
    """Where draws and certificates are kept."""
    return absolute(records) if records else str(AUDITS)


def key_name(*parts: str) -> str:
    """An artifact's key: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
