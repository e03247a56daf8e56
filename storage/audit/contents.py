"""What a release must list: everything that a replay reads, with the digests that run and mix demand.

A publisher signs a list of objects. That each object is as listed says nothing about what the list leaves out, nor
about a list made anew over exchanged objects.
"""

from collections.abc import Mapping

from storage import checkpoint
from storage.beside import digests_key, load_digests
from storage.errors import InputFault
from storage.ledger import HEADER_KEY
from storage.run import Run

MIX = "mix/"  # where a release holds its mix
MANIFEST_KEY = MIX + "manifest.json"


def needed(run: Run) -> dict[str, str]:
    """Key in the release → digest, "" where only the content itself can prove it; up to the ledger's last step.

    Reads checkpoints' manifests and the digests beside the entries, and raises what they deserve if they do not belong
    to this ledger.
    """
    keys = {HEADER_KEY: "", MANIFEST_KEY: ""} | {key: "" for key in run.ledger.parts}
    keys |= {MIX + key: file.digest for key, file in run.stream.manifest.files.items()}
    for step in checkpoint.steps(run.store):
        if step <= len(run.ledger):
            manifest = checkpoint.load_manifest(run.store, run.ledger, step)
            digests = [manifest.leaves, *(part.digest for part in manifest.parts)]
            keys |= {checkpoint.checkpoint_key(step): ""} | {checkpoint.object_key(d): d for d in digests}
    beside = set(run.store.list("digests/"))
    for entry in run.ledger:
        if (key := digests_key(entry.step)) in beside:
            load_digests(run.store, entry)
            keys[key] = ""
    return keys


def check_listed(needed: Mapping[str, str], listed: Mapping[str, str]) -> None:
    """InputFault for the first needed object that the release leaves out or lists with another digest."""
    for key, digest in needed.items():
        if key not in listed:
            raise InputFault(
                f"the release does not list {key}, which a replay reads",
                cause="the publisher left it out, or the copy was not complete",
                next_step="do not rely on this release; ask its publisher",
            )
        if digest and listed[key] != digest:
            raise InputFault(
                f"{key} has digest {listed[key]}, run and mix demand {digest}",
                cause="it was damaged or replaced before it was published",
                next_step="fetch it again from its publisher; in your own run, prepare or train it again",
            )
