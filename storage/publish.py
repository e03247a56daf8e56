"""Publishing: a run and its mix under one address, read back object by object, then signed.

    run layout as it is, mix/ beside it, and last of all
    RELEASE.json    {"body": {run, head, steps, …, objects: {key: {digest, size}}}, "signature": trainer's}

Without RELEASE.json a copy is not published. It can be stopped anywhere and repeated: what is there already is
compared, not copied again. Nothing is ever overwritten.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from storage.audit.contents import MIX, check_listed, needed
from storage.audit.keys import Key, verify_signature
from storage.copying import PublishProgress, Source, copy_all
from storage.corpus.made_with import KEY as MADE_WITH
from storage.corpus.manifest import KEY as MIX_MANIFEST
from storage.errors import InputFault, MissingObject, Refused, UsageError
from storage.ledger import HEADER_KEY, MAX_HEADER, Ledger
from storage.records import Count, Digest, Record, Signature
from storage.run import Run, open_run
from storage.store import Store, create_same
from storage.stream import Stream

RELEASE_KEY = "RELEASE.json"
MAX_RELEASE = 256 << 20
PURPOSE = "release"
RUN_FOLDERS = ("ledger/", "digests/", "checkpoints/", "objects/", "segments/", "probe/", "diagnostics/", "recipe.yaml")
_OF_STEP = re.compile(r"(ledger|digests|diagnostics|checkpoints|probe)/(\d{8})\.jsonl?")


class Object(Record):
    """One published object."""

    digest: Digest
    size: Count


class ReleaseBody(Record):
    """What is published: the ledger up to `head`, and every object."""

    kind: Literal["release"] = "release"
    run: Digest
    head: Digest
    steps: Count
    trajectory_root: Digest
    mix_root: Digest
    objects: dict[str, Object]


class Release(Record):
    """A release, signed by the key that the ledger's header names."""

    body: ReleaseBody
    signature: Signature


@dataclass(frozen=True)
class Published:
    """What was published; copied: objects that were not there before."""

    uri: str
    release: ReleaseBody
    copied: int
    size: int


def publish(
    run_store: Store,
    mix_store: Store,
    target: Store,
    key: Key,
    report: Callable[[PublishProgress], None] = lambda progress: None,
) -> Published:
    """Copy the run and its mix to `target`, read every object back and compare, then write RELEASE.json.

    Where this head is released already, its objects are read and compared; what was added to the run since stays out.
    Raises Refused if `key` is not the run's trainer or the target holds another run or an earlier release,
    LedgerFault, CheckpointFault or InputFault if something of the run is damaged, StorageError.
    """
    run = open_run(run_store, Stream.open(mix_store))
    if key.public != run.ledger.header.trainer:
        raise Refused(
            f"the key {key.public} is not the run's trainer {run.ledger.header.trainer}",
            cause="another key folder than in training",
            next_step="publish with the key folder that the run was begun with",
        )
    if released := _check_target(target, run):
        check_objects(target, released)
        return Published(target.uri, released, 0, _size(released.objects))
    demanded = needed(run)
    work = {key: Source(store, source, demanded.get(key, "")) for store, source, key in _objects(run, mix_store)}
    copies = copy_all(work, target, report)
    objects = {key: Object(digest=copy.digest, size=copy.size) for key, copy in copies.items()}
    check_listed(demanded, {key: entry.digest for key, entry in objects.items()})
    body = ReleaseBody(
        run=run.ledger.run_id,
        head=run.ledger.head,
        steps=len(run.ledger),
        trajectory_root=run.ledger.trajectory_root(),
        mix_root=run.ledger.header.mix_root,
        objects=objects,
    )
    release = Release(body=body, signature=key.sign(body.canonical(), PURPOSE))
    create_same(target, RELEASE_KEY, release.canonical())
    return Published(target.uri, body, sum(copy.new for copy in copies.values()), _size(objects))


def load_release(store: Store, ledger: Ledger) -> ReleaseBody:
    """The release, its signature checked against the ledger's trainer and its head against the ledger.

    Raises Refused where nothing was published, InputFault otherwise. The objects are not read.
    """
    try:
        data = store.read(RELEASE_KEY, limit=MAX_RELEASE)
    except MissingObject:
        raise Refused(
            f"{store.uri} has no {RELEASE_KEY}: it is not a finished publication",
            cause="publishing was interrupted, or this is a run's own folder",
            next_step="verbatim publish, again if it was stopped",
        ) from None
    release = Release.parse(data, RELEASE_KEY)
    body = release.body
    if not verify_signature(ledger.header.trainer, release.signature, body.canonical(), PURPOSE):
        raise InputFault(f"{RELEASE_KEY}: the signature is not that of the run's trainer {ledger.header.trainer}")
    for what, found, expected in (
        ("run", body.run, ledger.run_id),
        ("number of steps", body.steps, len(ledger)),
        ("head", body.head, ledger.head),
        ("trajectory root", body.trajectory_root, ledger.trajectory_root()),
        ("mix root", body.mix_root, ledger.header.mix_root),
    ):
        if found != expected:
            raise InputFault(
                f"{RELEASE_KEY}: its {what} is {found}, the ledger's is {expected}",
                cause="the ledger was cut off or changed after it was published",
                next_step="fetch the ledger again from its publisher",
            )
    return body


def check_objects(store: Store, body: ReleaseBody) -> None:
    """Read every published object and compare; InputFault names the first that is missing or differs."""
    for key, entry in body.objects.items():
        try:
            size = store.size(key)
        except UsageError as error:
            raise InputFault(f"{RELEASE_KEY}: {error}") from None
        if size != entry.size:
            raise InputFault(
                f"{store.uri}: {key} holds {size} bytes, {RELEASE_KEY} says {entry.size}",
                cause="the object was damaged or replaced after it was written",
                next_step="fetch it again from its publisher",
            )
        store.read(key, entry.digest, limit=entry.size)


def _objects(run: Run, mix_store: Store) -> Iterator[tuple[Store, str, str]]:
    """(store, key there, key in the release), the header first: it claims the target for this run."""
    yield run.store, HEADER_KEY, HEADER_KEY
    for folder in RUN_FOLDERS:
        for key in run.store.list(folder):
            if key != HEADER_KEY and not _after(key, len(run.ledger)):
                yield run.store, key, key
    for key in (*run.stream.manifest.files, *mix_store.list(MADE_WITH), MIX_MANIFEST):
        yield mix_store, key, MIX + key


def _after(key: str, steps: int) -> bool:
    """Whether the object is of a step that was trained since the ledger was read; the release ends before it."""
    match = _OF_STEP.fullmatch(key)
    if not match:
        return False
    return int(match[2]) >= steps + (match[1] in ("checkpoints", "probe"))  # state `steps` is that after the last


def _size(objects: dict[str, Object]) -> int:
    return sum(entry.size for entry in objects.values())


def _check_target(target: Store, run: Run) -> ReleaseBody | None:
    """The release of this head, if the target holds it; Refused if it holds something else."""
    keys = target.list()
    if not keys:
        return None
    ours = run.ledger.header.canonical()
    if HEADER_KEY not in keys or target.read(HEADER_KEY, limit=MAX_HEADER) != ours:
        raise Refused(
            f"{target.uri} is not empty and does not hold run {run.ledger.run_id}; nothing was written",
            cause="another run was published under this address",
            next_step="choose another target",
        )
    if RELEASE_KEY not in keys:
        return None
    released = Release.parse(target.read(RELEASE_KEY, limit=MAX_RELEASE), RELEASE_KEY).body
    if (released.steps, released.head) != (len(run.ledger), run.ledger.head):
        raise Refused(
            f"{target.uri} holds a release of {released.steps} steps (head {released.head}), "
            f"the run has {len(run.ledger)} (head {run.ledger.head}); nothing was written",
            cause="the run went on after it was published; a release never changes",
            next_step="publish to another target",
        )
    return load_release(target, run.ledger)
