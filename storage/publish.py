"""Publishing: a run, its mix and what belongs to them under one address, read back object by object, then signed.

    run layout as it is, mix/, audits/, code/, export/, index.html; last of all RELEASE.json    (classes.py, release.py)

Without RELEASE.json a copy is not published. It can be stopped anywhere and repeated: what is there already is
compared, not copied again. Nothing is ever overwritten.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from storage.audit.contents import MIX, check_listed, needed
from storage.audit.kept import AUDITS, records_of
from storage.audit.keys import Key
from storage.classes import RUN_CLASSES, class_of, may_come_later
from storage.copying import ELSEWHERE, PublishProgress, Source, copy_all
from storage.corpus.made_with import KEY as MADE_WITH
from storage.corpus.manifest import KEY as MIX_MANIFEST
from storage.errors import InputFault, LedgerFault, MissingObject, Refused, StorageError
from storage.ledger import HEADER_KEY, MAX_HEADER, Header
from storage.made import Made, made
from storage.objects import MAX_OBJECT, check_limit
from storage.olmes import records_in
from storage.release import (
    MAX_RELEASE,
    PURPOSE,
    RELEASE_KEY,
    Object,
    Release,
    ReleaseBody,
    check_objects,
    grouped,
    load_release,
    signed_release,
)
from storage.run import Run, open_run
from storage.store import Store, create_same, object_digest
from storage.stream import Stream

WORKING = ("lease/", "parts/")  # of a run and of a mix: what only their making needs
_OF_STEP = re.compile(r"(ledger|digests|diagnostics|checkpoints|probe)/(\d{8})\.jsonl?")


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
    records: Store | None = None,
    report: Callable[[PublishProgress], None] = lambda progress: None,
) -> Published:
    """Copy the run and its mix to `target`, read every object back and compare, then write RELEASE.json.

    records: an auditor's, of which those of this run are published too. Where this head is released already, its
    objects are read and compared, and records that came since are added beside them, where they are found by listing;
    what was added to the run since stays out.
    Raises Refused if `key` is not the run's trainer or the target holds anything else, another run or an earlier
    release, LedgerFault, CheckpointFault or InputFault if something of the run is damaged, StorageError.
    """
    run = open_run(run_store, Stream.open(mix_store))
    if key.public != run.ledger.header.trainer:
        raise Refused(
            f"the key {key.public} is not the run's trainer {run.ledger.header.trainer}",
            cause="another key folder than in training",
            next_step="publish with the key folder that the run was begun with",
        )
    _check_apart(target, [run_store, mix_store])
    kept = records_of(records, run.ledger) if records else {}
    if released := _check_target(target, run):
        check_objects(target, released)
        added = _add_later(target, released, kept, records, report)
        return Published(target.uri, released, added, released.size)
    demanded = needed(run) | {AUDITS + key: digest for key, digest in kept.items()}
    work = [*_of_run(run, demanded), *_of_mix(run, mix_store)]
    work += [(records, key, AUDITS + key) for key in kept if records]
    scores = [body for _, body in records_in(records, run.ledger).values()] if records else []
    ours = made(run, {key: _size(store, source) for store, source, key in work}, scores)
    work += [(ours.store, key, key) for key in ours.store.list()]
    _check_nothing_else(target, (key for _, _, key in work))
    demanded |= ours.store.digests
    sources = {key: Source(store, at, demanded.get(key, "")) for store, at, key in work}
    try:
        copies = copy_all(sources, target, report)
    except InputFault:
        _check_not_lost(target, run)
        raise
    objects = {key: Object(digest=copy.digest, size=copy.size) for key, copy in copies.items()}
    check_listed(demanded, {key: entry.digest for key, entry in objects.items()})
    body = _body(run, ours, objects)
    release = Release(body=body, signature=key.sign(body.canonical(), PURPOSE))
    create_same(target, RELEASE_KEY, release.canonical())
    return Published(target.uri, body, sum(copy.new for copy in copies.values()), body.size)


def _body(run: Run, ours: Made, objects: dict[str, Object]) -> ReleaseBody:
    header = run.ledger.header
    return ReleaseBody(
        run=run.ledger.run_id,
        head=run.ledger.head,
        steps=len(run.ledger),
        trajectory_root=run.ledger.trajectory_root(),
        mix_root=header.mix_root,
        code=ours.code,
        lock=ours.lock,
        declared_code=ours.code == header.code,
        declared_lock=ours.lock == header.lock,
        classes=grouped(objects),
    )


def _of_run(run: Run, demanded: dict[str, str]) -> Iterator[tuple[Store, str, str]]:
    """The run's own objects, the header first: it claims the target for this run.

    Of checkpoints and their parts those that were whole when `demanded` was made: not what an interrupted save left.
    """
    yield run.store, HEADER_KEY, HEADER_KEY
    for key in run.store.list():
        if key == HEADER_KEY or key.startswith(WORKING):
            continue
        if class_of(key) not in RUN_CLASSES:
            raise _foreign(run.store, key)
        not_whole = class_of(key) == "checkpoints" and key not in demanded
        if not not_whole and not _after(key, len(run.ledger)):
            yield run.store, key, key


def _size(store: Store, key: str) -> int:
    """Bytes of an object; InputFault if no reader would take so many."""
    size = store.size(key)
    check_limit(store.uri, key, size, MAX_OBJECT)
    return size


def _of_mix(run: Run, mix_store: Store) -> Iterator[tuple[Store, str, str]]:
    """The mix: the files that its manifest lists, the manifest, and what it was made with."""
    listed = {*run.stream.manifest.files, MIX_MANIFEST, MADE_WITH}
    for key in mix_store.list():
        if not key.startswith(WORKING) and key not in listed:
            raise _foreign(mix_store, key)
    for key in (*run.stream.manifest.files, *mix_store.list(MADE_WITH), MIX_MANIFEST):
        yield mix_store, key, MIX + key


def _check_apart(target: Store, sources: Iterable[Store]) -> None:
    """Refused where the copy would lie in what is copied, and then be a part of it."""
    for source in sources:
        if f"{target.uri}/".startswith(f"{source.uri}/"):
            raise Refused(
                f"{target.uri} lies in {source.uri}, which is to be published; nothing was written",
                cause="a slip in the target's address",
                next_step="publish to another target",
            )


def _foreign(store: Store, key: str) -> InputFault:
    return InputFault(
        f"{store.uri}: {key} belongs to no class of objects that a release holds; nothing was written",
        cause="a file that is not the run's was put there",
        next_step="move it elsewhere, then publish again",
    )


def _check_nothing_else(target: Store, keys: Iterable[str]) -> None:
    """Refused if the target holds what will not be listed: the end of a publication that was begun otherwise."""
    there, ours = {key for key in target.list() if not may_come_later(key)}, set(keys)
    for key in sorted(there.difference(ours, [RELEASE_KEY])):  # which another publisher may have finished
        code = [other for other in ours if class_of(other) == class_of(key) == "code"]
        instead = f", but {code[0]}" if code else ""
        raise Refused(
            f"{target.uri} holds {key}, which this publication does not{instead}; nothing was written",
            cause="publishing was begun by other code or from another state of the run, or someone put it there",
            next_step=ELSEWHERE,
        )


def _add_later(
    target: Store,
    released: ReleaseBody,
    kept: dict[str, str],
    records: Store | None,
    report: Callable[[PublishProgress], None],
) -> int:
    """Copy the records that the release does not list; how many were not there yet."""
    later = {AUDITS + key: digest for key, digest in kept.items() if AUDITS + key not in released.objects}
    sources = {key: Source(records, key.removeprefix(AUDITS), digest) for key, digest in later.items() if records}
    return sum(copy.new for copy in copy_all(sources, target, report).values()) if sources else 0


def _after(key: str, steps: int) -> bool:
    """Whether the object is of a step that was trained since the ledger was read; the release ends before it."""
    match = _OF_STEP.fullmatch(key)
    if not match:
        return False
    return int(match[2]) >= steps + (match[1] in ("checkpoints", "probe"))  # state `steps` is that after the last


def _check_target(target: Store, run: Run) -> ReleaseBody | None:
    """The release of this head, if the target holds it; Refused if it holds something else."""
    if not _holds_run(target, run):
        return None
    try:
        data = target.read(RELEASE_KEY, limit=MAX_RELEASE)
        released = signed_release(data, RELEASE_KEY, [run.ledger.header.trainer]).body
    except MissingObject:
        return None
    if (released.steps, released.head) != (len(run.ledger), run.ledger.head):
        raise Refused(
            f"{target.uri} holds a release of {released.steps} steps (head {released.head}), "
            f"the run has {len(run.ledger)} (head {run.ledger.head}); nothing was written",
            cause="the run went on after it was published; a release never changes",
            next_step="publish to another target",
        )
    return load_release(target, run.ledger)


def _check_not_lost(target: Store, run: Run) -> None:
    """Refused if another run's publisher was faster; a header that is none is our own, damaged on its way."""
    with suppress(InputFault, StorageError):
        Header.parse(target.read(HEADER_KEY, limit=MAX_HEADER), HEADER_KEY, LedgerFault)
        _holds_run(target, run)


def _holds_run(target: Store, run: Run) -> bool:
    """Whether the run was begun to be published there; Refused if something else is. A listing alone may be late."""
    ours = run.ledger.header.canonical()
    try:
        target.read(HEADER_KEY, object_digest(ours), limit=MAX_HEADER)
        return True
    except MissingObject:
        if not target.list():
            return False
    except InputFault:
        pass
    raise Refused(
        f"{target.uri} is not empty and does not hold run {run.ledger.run_id}; nothing was written",
        cause="another run was published under this address",
        next_step="choose another target",
    )
