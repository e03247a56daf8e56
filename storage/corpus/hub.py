"""Hugging Face data sets: the address of a file at a commit, and the files of a whole set out of their list of pins."""

import os
from fnmatch import fnmatchcase

from huggingface_hub import get_token, hf_hub_url
from pydantic import TypeAdapter, ValidationError

from kernels import canonical
from storage.corpus.spec import HubFile, HubFiles, HubPath, Pin
from storage.errors import InputFault, Refused
from storage.records import first


class Listed(Pin):
    """A file of the data set, as its list pins it."""

    file: HubPath


_LIST = TypeAdapter(list[Listed])


def url(pin: HubFile) -> str:
    """Where the hub serves the file, or the mirror that HF_ENDPOINT names: which of them changes no bit."""
    return hf_hub_url(
        pin.dataset, pin.file, repo_type="dataset", revision=pin.revision, endpoint=os.environ.get("HF_ENDPOINT")
    )


def token() -> str | None:
    """The token of whoever runs this, for data sets with terms to accept: HF_TOKEN, or what `hf auth login` stored."""
    return get_token()


def files_of(hub: HubFiles, pins: bytes | None) -> list[HubFile]:
    """The files of the set whose names match its globs; `pins`: the bytes of its list."""
    if pins is None:
        raise Refused(
            f"{hub.dataset} at commit {hub.revision[:12]} cannot be prepared: its files have no digests yet",
            cause="a commit names files, but only a size and a sha256 say what is in them",
            next_step="pin each as kind: hub (file, size, sha256), or give pins: a list of all of them",
        )
    try:
        listed = _LIST.validate_python(canonical.loads(pins))
    except (canonical.NotCanonical, ValidationError) as error:
        why = first(error) if isinstance(error, ValidationError) else error
        raise InputFault(f"{hub.name}: its list of pins is none: {why}", cause="another file was pinned") from None
    about = {"kind": "hub", "dataset": hub.dataset, "revision": hub.revision, "licence": hub.licence}
    files = [
        HubFile.model_validate(about | one.model_dump() | {"extract": hub.extract})
        for one in listed
        if any(fnmatchcase(one.file, glob) for glob in hub.include)
    ]
    if not files:
        raise InputFault(f"{hub.name}: of the {len(listed)} files of its list none matches", cause="wrong globs")
    return files
