"""What a release must list: everything that a replay reads, with the digests that run and mix demand.

A publisher signs a list of objects. That each object is as listed says nothing about what the list leaves out, nor
about a list made anew over exchanged objects.
"""

from collections.abc import Iterator, Mapping

from kernels import canonical
from storage import checkpoint
from storage.beside import digests_key, load_digests
from storage.errors import InputFault
from storage.ledger import HEADER_KEY, Ledger, first_step
from storage.run import Run
from storage.store import object_digest

MIX = "mix/"  # where a release holds its mix
MANIFEST_KEY = MIX + "manifest.json"


def needed(run: Run) -> dict[str, str]:
    """Key in the release → digest, up to the ledger's last step.

    Reads checkpoints' manifests and the digests beside the entries, and raises what they deserve if they do not belong
    to this ledger. A record has one form, so its content tells the digest of the bytes that were read.
    """
    keys = {HEADER_KEY: object_digest(run.ledger.header.canonical())} | dict(_parts(run.ledger))
    keys[MANIFEST_KEY] = object_digest(canonical.dumps(run.stream.manifest.model_dump(mode="json")))
    keys |= {MIX + key: file.digest for key, file in run.stream.manifest.files.items()}
    for step in checkpoint.steps(run.store):
        if step <= len(run.ledger):
            manifest = checkpoint.load_manifest(run.store, run.ledger, step)
            digests = [manifest.leaves, *(part.digest for part in manifest.parts)]
            keys[checkpoint.checkpoint_key(step)] = object_digest(manifest.canonical())
            keys |= {checkpoint.object_key(digest): digest for digest in digests}
    beside = set(run.store.list("digests/"))
    for entry in run.ledger:
        if (key := digests_key(entry.step)) in beside:
            keys[key] = object_digest(load_digests(run.store, entry).canonical())
    return keys


def _parts(ledger: Ledger) -> Iterator[tuple[str, str]]:
    """Key and digest of each part of the ledger."""
    ends = [*map(first_step, ledger.parts[1:]), len(ledger)]
    for key, end in zip(ledger.parts, ends, strict=False):  # no parts, no entries
        yield key, object_digest([ledger[step].canonical() + b"\n" for step in range(first_step(key), end)])


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
