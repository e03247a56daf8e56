"""What tasks hand to each other: addresses and digests, a few hundred bytes. Data never passes through Prefect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

RecipeName = Annotated[
    str, Field(title="Recipe", description="A name in deployments/recipes, such as demo, or the path of a YAML file.")
]
Folder = Annotated[
    str,
    Field(
        title="Folder",
        description="Where the run lives: its windows (mix/), ledger and checkpoints (run/), certificates. "
        "Empty: runs/<name of the recipe>.",
    ),
]
Release = Annotated[
    str, Field(title="Published run", description="Folder or address that `publish` wrote, e.g. runs/demo/published.")
]
Backend = Annotated[
    str, Field(title="Backend", description="cpu (fast) or reference (plain NumPy, slow). It changes no bit.")
]


class Places(BaseModel):
    """The folders of one run on this machine."""

    model_config = ConfigDict(frozen=True)

    root: Path

    @property
    def mix(self) -> str:
        """Windows, documents' index, tokenizer, manifest."""
        return str(self.root / "mix")

    @property
    def run(self) -> str:
        """Ledger, checkpoints, segment records."""
        return str(self.root / "run")

    @property
    def published(self) -> str:
        """A copy for strangers, from which alone every audit works."""
        return str(self.root / "published")

    @property
    def certificates(self) -> str:
        """What this machine's audits signed."""
        return str(self.root / "certificates")


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
    """One stretch of training in one process: steps first_step up to, not including, end_step."""

    first_step: int
    end_step: int
    validated: list[int]
    seconds: float
    head: str


class Trained(Reference):
    """A run that has reached `steps`."""

    uri: str
    steps: int
    ledger_head: str
    trajectory_root: str


class Published(Reference):
    """A release: a whole run under one address."""

    uri: str
    objects: int
    size: int


class Audited(Reference):
    """One audit's outcome and where its certificate lies."""

    step: int
    verdict: str
    exit_code: int
    seconds: float
    certificate: str
