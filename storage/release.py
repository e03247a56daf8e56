"""The record of a release: what is published, each object with its digest and size, by class, signed by the trainer.

    RELEASE.json    {"body": {run, head, steps, …, classes: {class: {count, bytes, objects}}}, "signature": trainer's}

It is written last, so without it a copy is not published, and with it nothing of the copy ever changes. Its signature
is checked over its bytes before they are parsed, so what a stranger wrote takes no more memory than it is long.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from storage.audit.keys import verify_signature
from storage.classes import CLASSES, class_of
from storage.errors import InputFault, MissingObject, Refused, UsageError
from storage.ledger import Ledger
from storage.objects import MAX_OBJECT
from storage.records import Count, Digest, Record, Signature
from storage.store import Store

RELEASE_KEY = "RELEASE.json"
# Bytes. That of OPEN-1B, 80,957 steps with a checkpoint every 100, lists 229,852 objects in 28.5 MB, and takes 0.34 GB
# of memory to be read; half as much again is allowed. A trainer who signs something odd can make that 1.3 GB.
MAX_RELEASE = 48 << 20
PURPOSE = "release"
_BEFORE, _AFTER = b'{"body":', 128 + len(b',"signature":""}')  # what stands around a body's bytes
_END = re.compile(rb'"run":"([0-9a-f]{64})","steps":\d{1,16},"trajectory_root":"[0-9a-f]{64}"},"signature":"\w+"}\Z')


class Object(Record):
    """One published object; one that is longer than any reader takes cannot be listed."""

    digest: Digest
    size: Annotated[int, Field(ge=0, le=MAX_OBJECT)]


class Group(Record):
    """The objects of one class, by key: how many, and how many bytes they hold."""

    count: Count
    bytes: Count
    objects: dict[str, Object]


class ReleaseBody(Record):
    """What is published: the ledger up to `head`, and every object.

    code, lock: digests of the code and the dependency lock that are published here. declared_*: whether the ledger's
    header names the same, that is, whether the run was begun with them.
    """

    kind: Literal["release"] = "release"
    run: Digest
    head: Digest
    steps: Count
    trajectory_root: Digest
    mix_root: Digest
    code: Digest
    lock: Digest
    declared_code: bool
    declared_lock: bool
    classes: dict[str, Group]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sorted(self.classes) != sorted(CLASSES):
            lacks, other = sorted({*CLASSES} - {*self.classes}), sorted({*self.classes} - {*CLASSES})
            raise ValueError(
                f"it lists no class {', '.join(lacks) or '-'}, and the unknown {', '.join(other)[:200] or '-'}: it was "
                "published by other code than this, and is to be read by that, which lies in it under code/"
            )
        for name, group in self.classes.items():
            for key in group.objects:
                if class_of(key) != name:
                    raise ValueError(f"object key {key[:200]!r} is not allowed in class {name}")
            if (group.count, group.bytes) != totals(group.objects):
                raise ValueError(f"class {name} says {group.count} objects of {group.bytes} bytes, lists others")
        return self

    @cached_property
    def objects(self) -> dict[str, Object]:
        """Every object, by key."""
        return {key: entry for group in self.classes.values() for key, entry in group.objects.items()}

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(group.bytes for group in self.classes.values())


class Release(Record):
    """A release, signed by the key that the ledger's header names."""

    body: ReleaseBody
    signature: Signature


def grouped(objects: Mapping[str, Object]) -> dict[str, Group]:
    """The objects by class, every class in its place; each key must fit one."""
    groups: dict[str, dict[str, Object]] = {name: {} for name in CLASSES}
    for key, entry in objects.items():
        groups[class_of(key)][key] = entry
    return {name: _group(members) for name, members in groups.items()}


def _group(objects: dict[str, Object]) -> Group:
    count, size = totals(objects)
    return Group(count=count, bytes=size, objects=objects)


def totals(objects: Mapping[str, Object]) -> tuple[int, int]:
    """(number of objects, bytes)."""
    return len(objects), sum(entry.size for entry in objects.values())


def signed_release(data: bytes, where: str, trainers: Iterable[str]) -> Release:
    """The release of these bytes; InputFault unless one of the trainers signed it, which is checked first."""
    signature = data[-130:-2].decode("ascii", "replace")
    keys = list(trainers)
    if not any(verify_signature(key, signature, data[len(_BEFORE) : -_AFTER], PURPOSE) for key in keys):
        raise InputFault(
            f"{where}: the signature is not that of the run's trainer {' or '.join(keys)}",
            cause="the object was damaged or edited, or is another run's",
            next_step="fetch it again from its publisher",
        )
    return Release.parse(data, where)


def named_run(data: bytes) -> str:
    """The run whose release these bytes say that they are, "" if they do not say. Nothing is proven by it."""
    found = _END.search(data[-1000:])
    return found[1].decode() if found else ""


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
    body = signed_release(data, RELEASE_KEY, [ledger.header.trainer]).body
    for what, found, expected in (
        ("run", body.run, ledger.run_id),
        ("number of steps", body.steps, len(ledger)),
        ("head", body.head, ledger.head),
        ("trajectory root", body.trajectory_root, ledger.trajectory_root()),
        ("mix root", body.mix_root, ledger.header.mix_root),
        ("word on the code", body.declared_code, body.code == ledger.header.code),
        ("word on the lock", body.declared_lock, body.lock == ledger.header.lock),
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
