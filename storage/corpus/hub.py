"""Hugging Face data sets: the address of a file at a commit, and the files of a whole set out of their list of pins.

    python -m storage.corpus.hub some/set COMMIT 'data/*.parquet' > pins.json

asks the hub for such a list, once; the recipe pins the list, and the list each file.
"""

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from huggingface_hub import constants, get_token, hf_hub_url
from pydantic import TypeAdapter, ValidationError

from kernels import canonical
from storage.corpus.remote import Passing, open_remote, read_page
from storage.corpus.spec import HubFile, HubFiles, HubPath, Pin
from storage.errors import InputFault, Refused, VerbatimError
from storage.records import first


class Listed(Pin):
    """A file of the data set, as its list pins it."""

    file: HubPath


_LIST = TypeAdapter(list[Listed])


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", constants.ENDPOINT)


def url(dataset: str, revision: str, file: str) -> str:
    """Where the hub serves the file, or the mirror that HF_ENDPOINT names: which of them changes no bit."""
    return hf_hub_url(dataset, file, repo_type="dataset", revision=revision, endpoint=_endpoint())


def token() -> str | None:
    """The token of whoever runs this, for data sets with terms to accept: HF_TOKEN, or what `hf auth login` stored."""
    return get_token()


def files_of(hub: HubFiles, pins: bytes | None) -> list[HubFile]:
    """The files of the set whose names match its globs; `pins`: the bytes of its list."""
    if pins is None:
        raise Refused(
            f"{hub.dataset} at commit {hub.revision[:12]} cannot be prepared: its files have no digests yet",
            cause="a commit names files, but only a size and a sha256 say what is in them",
            next_step=f"list them: python -m storage.corpus.hub {hub.dataset} {hub.revision} "
            f"{shlex.join(hub.include)} > FILE, and give that file as pins in the recipe",
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


def list_files(dataset: str, revision: str, include: list[str]) -> bytes:
    """The list that pins the set's files whose names match a glob, as the hub tells size and sha256 at this commit.

    A file that the hub keeps in git, not in its large storage, is fetched and digested here. VerbatimError if the hub
    cannot be asked, or answers what it should not.
    """
    try:
        entries = [entry for entry in _tree(dataset, revision) if entry["type"] == "file"]
        chosen = [entry for entry in entries if any(fnmatchcase(entry["path"], glob) for glob in include)]
        pins = [_pin(dataset, revision, entry) for entry in sorted(chosen, key=lambda entry: entry["path"])]
    except (KeyError, TypeError, ValidationError) as error:
        raise VerbatimError(f"{_endpoint()} lists {dataset} in an unknown form: {error!r}", cause="no hub") from error
    return canonical.dumps([pin.model_dump(mode="json") for pin in pins])


def _tree(dataset: str, revision: str) -> Iterator[dict[str, Any]]:
    page: str | None = f"{_endpoint()}/api/datasets/{dataset}/tree/{revision}?recursive=true"
    while page is not None:
        if not page.startswith(f"{_endpoint()}/"):  # which would get the token, or be no web address at all
            raise VerbatimError(f"{_endpoint()} goes on with its list at another host: {page}", cause="no hub")
        entries, page = read_page(page, token())
        yield from entries


def _pin(dataset: str, revision: str, entry: dict[str, Any]) -> Listed:
    if "lfs" in entry:
        return Listed(file=entry["path"], size=entry["lfs"]["size"], sha256=entry["lfs"]["oid"])
    found, size = hashlib.sha256(), 0
    address = url(dataset, revision, entry["path"])
    try:
        with open_remote(address, 0, token()) as answer:
            for piece in iter(lambda: answer.read(1 << 20), b""):
                found.update(piece)
                size += len(piece)
    except Passing as error:
        raise VerbatimError(f"{address}: {error}", cause="the network or the server is down") from error
    if size != entry["size"]:
        raise VerbatimError(f"{address}: {size} of {entry['size']} bytes came", cause="the connection broke")
    return Listed(file=entry["path"], size=size, sha256=found.hexdigest())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m storage.corpus.hub", description=list_files.__doc__)
    parser.add_argument("dataset")
    parser.add_argument("commit")
    parser.add_argument("globs", nargs="+")
    given = parser.parse_args()
    try:
        found = list_files(given.dataset, given.commit, given.globs)
    except VerbatimError as error:
        sys.exit(f"error: {error}")
    print(f"pins: {{path: …, size: {len(found)}, sha256: {hashlib.sha256(found).hexdigest()}}}", file=sys.stderr)
    sys.stdout.buffer.write(found)


if __name__ == "__main__":
    main()
