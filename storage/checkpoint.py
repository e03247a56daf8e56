"""Checkpoints: state k, that is the state after k steps, in files that can run nothing.

    checkpoints/<k>.json      the manifest, created last: a checkpoint exists wholly or not at all
    objects/<digest>          safetensors parts of at most 1 GiB (or one tensor), and one object with all leaf digests

Each level proves the next, so that damage is named exactly and nothing unproven is used:

    ledger's state root → tensor digests (manifest) → leaf digests (leaves object) → rows (parts)

A part's header is not parsed. It must be, byte for byte, what this file writes for the tensors that the run spec
demands, so a hostile header has nothing to attack; sizes are compared before anything is read.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from kernels import canonical
from kernels.digest import leaf_rows, leaves, root, tensor_digest
from model.spec import ModelSpec
from model.state import State, zeros
from storage.errors import CheckpointFault, Divergence, MissingObject
from storage.ledger import Ledger
from storage.memory import Allocate
from storage.objects import Data
from storage.records import Count, Digest, Record
from storage.store import Store, create_same, object_digest, sound

PART_BYTES = 1 << 30
PIECE_BYTES = 64 << 20  # of a part, written and read at a time
MAX_MANIFEST = 4 << 20
LEAF = 32  # bytes of a leaf digest
_KEY = re.compile(r"checkpoints/(\d{8})\.json")

Shapes = dict[str, tuple[int, ...]]


class Part(Record):
    """One safetensors object: its digest and, in order, the tensors that it holds."""

    digest: Digest
    tensors: list[str]


class Manifest(Record):
    """One checkpoint. `leaves` is the object that holds the leaf digests of all tensors in name order."""

    kind: Literal["checkpoint"] = "checkpoint"
    run: Digest
    step: Count
    root: Digest
    scalars: dict[str, Any]
    tensors: dict[str, Digest]
    leaves: Digest
    parts: list[Part]


def checkpoint_key(step: int) -> str:
    """Key of the manifest of checkpoint `step`."""
    return f"checkpoints/{step:08d}.json"


def object_key(digest: str) -> str:
    """Key of a content-addressed object."""
    return f"objects/{digest}"


def steps(store: Store) -> list[int]:
    """All k for which a checkpoint exists, in order. A save that was cut off has no manifest, so it is none."""
    matches = [_KEY.fullmatch(key) for key in store.list("checkpoints/")]
    return [int(match[1]) for match in matches if match]


def state_shapes(spec: ModelSpec) -> Shapes:
    """Name → shape of every float32 tensor of a state, in name order."""
    shapes = spec.shapes()
    return {f"{group}/{name}": shapes[name] for group in ("m", "v", "weights") for name in shapes}


def save(store: Store, ledger: Ledger, state: State) -> Manifest:
    """Write state `state.step`; Divergence if it is not the state that the ledger records. Doing it twice is fine."""
    tensors = state.tensors()
    tensor_leaves = {name: leaves(array) for name, array in tensors.items()}
    digests = {name: tensor_digest(name, array, tensor_leaves[name]) for name, array in tensors.items()}
    found, recorded = root(digests, state.scalars()), ledger.state_root(state.step)
    if found != recorded:
        raise Divergence(
            f"state {state.step} in memory has root {found}, the ledger records {recorded}; no checkpoint was written",
            cause="memory was damaged, or the state was changed between the step and its checkpoint",
            next_step="verbatim doctor, then train again: it goes on from the newest checkpoint",
        )
    shapes = {name: tuple(array.shape) for name, array in tensors.items()}
    parts = [Part(digest=put_object(store, _encode(group, tensors)), tensors=group) for group in parted(shapes)]
    manifest = Manifest(
        run=ledger.run_id,
        step=state.step,
        root=found,
        scalars=state.scalars(),
        tensors=digests,
        leaves=put_object(store, b"".join(tensor_leaves.values())),
        parts=parts,
    )
    create_same(store, checkpoint_key(state.step), manifest.canonical())
    return manifest


def load(
    store: Store, ledger: Ledger, step: int, moments: Allocate = zeros, wanted: Collection[str] | None = None
) -> State:
    """State `step`, every byte verified against the ledger. CheckpointFault names tensor, leaf and rows.

    moments: gives the arrays of m and v their place. wanted: the only tensors to be read, as "weights/…"; None: all.
    Beyond the state itself little memory is taken.
    """
    manifest = load_manifest(store, ledger, step)
    shapes = state_shapes(ledger.header.run_spec().model)
    try:
        tensors = dict(_tensors(store, manifest, shapes, moments, wanted))
    except MissingObject as error:
        raise _fault(step, f"checkpoint {step} is not complete: {error.message}") from None
    try:
        names = [name for name in shapes if wanted is None or name in wanted]
        state = State.of({name: tensors[name] for name in names}, manifest.scalars)
    except (ValueError, KeyError, TypeError) as error:
        raise _fault(step, f"{checkpoint_key(step)}: scalars are not a state's: {error}") from None
    if state.step != step or state.scalars() != manifest.scalars:
        raise _fault(step, f"{checkpoint_key(step)}: holds step {state.step}, expected {step}")
    return state


def check(store: Store, ledger: Ledger, step: int) -> None:
    """Verify checkpoint `step` against the ledger without holding more than one tensor; faults as in load()."""
    for _ in verified_tensors(store, ledger, step):
        pass


def check_there(store: Store, ledger: Ledger, step: int) -> None:
    """CheckpointFault or MissingObject unless checkpoint `step` is the ledger's by manifest and leaf digests, and each
    part has its size and header; cheap, reads no tensor."""
    manifest = load_manifest(store, ledger, step)
    shapes = state_shapes(ledger.header.run_spec().model)
    sound(store, object_key(manifest.leaves), lambda copy: _load_leaves(copy, manifest, shapes))
    for part in manifest.parts:
        _begin(store, part, shapes, step)


def verified_tensors(store: Store, ledger: Ledger, step: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, every tensor of checkpoint `step`), verified, one at a time; faults as in load()."""
    return _tensors(store, load_manifest(store, ledger, step), state_shapes(ledger.header.run_spec().model))


def _tensors(
    store: Store,
    manifest: Manifest,
    shapes: Shapes,
    moments: Allocate = zeros,
    wanted: Collection[str] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by name, or the wanted ones, verified, one at a time."""
    known = sound(store, object_key(manifest.leaves), lambda copy: _load_leaves(copy, manifest, shapes))
    step = manifest.step
    for part in manifest.parts:
        if wanted is None or set(wanted) & set(part.tensors):
            yield from _decode(store, part, known, shapes, step, moments, wanted)


def load_manifest(store: Store, ledger: Ledger, step: int) -> Manifest:
    """The manifest of checkpoint `step`, proven against the ledger; cheap, reads no tensor."""
    return sound(store, checkpoint_key(step), lambda copy: _read_manifest(copy, ledger, step))


def _read_manifest(store: Store, ledger: Ledger, step: int) -> Manifest:
    key = checkpoint_key(step)
    manifest = Manifest.parse(store.read(key, limit=MAX_MANIFEST), key, CheckpointFault)
    if (manifest.run, manifest.step) != (ledger.run_id, step):
        raise _fault(step, f"{key} is state {manifest.step} of run {manifest.run}, expected {step} of {ledger.run_id}")
    found, recorded = root(manifest.tensors, manifest.scalars), ledger.state_root(step)
    if found != recorded or manifest.root != recorded:
        raise _fault(step, f"{key}: its tensor digests give root {found}, the ledger records {recorded}")
    shapes = state_shapes(ledger.header.run_spec().model)
    if list(manifest.tensors) != list(shapes):
        odd = sorted(manifest.tensors.keys() ^ shapes.keys())
        raise _fault(step, f"{key}: tensors that the run spec and the manifest do not share: {', '.join(odd[:5])}")
    if [part.tensors for part in manifest.parts] != parted(shapes):
        raise _fault(step, f"{key}: its parts do not hold each tensor once, in order")
    return manifest


def _fault(step: int, message: str, next_step: str = "") -> CheckpointFault:
    before = f"rm {checkpoint_key(step)} in the run's folder, then train again: it replays from the checkpoint before"
    return CheckpointFault(
        message,
        cause="the disk or a copy damaged it, or someone edited it",
        next_step=next_step or f"fetch it again from its publisher; or, in your own run, {before}",
    )


def parted(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Names cut, in order, into parts of at most PART_BYTES, or of one tensor."""
    groups: list[list[str]] = []
    room = -1
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=np.int64))
        if size > room:
            groups.append([])
            room = PART_BYTES
        groups[-1].append(name)
        room -= size
    return groups


def safetensors_header(names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The safetensors header: tensors in name order without gaps, no metadata, padded with spaces to eight bytes."""
    fields, end = {}, 0
    for name in names:
        start, end = end, end + 4 * int(np.prod(shapes[name], dtype=np.int64))
        fields[name] = {"data_offsets": [start, end], "dtype": "F32", "shape": list(shapes[name])}
    text = canonical.dumps(fields)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _encode(names: list[str], tensors: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    """A part in pieces: views of the tensors' own memory behind a header."""
    pieces: list[bytes | memoryview] = [safetensors_header(names, {name: tuple(tensors[name].shape) for name in names})]
    for name in names:
        data = memoryview(np.ascontiguousarray(tensors[name], "<f4").reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        pieces += [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
    return pieces


def _decode(
    store: Store,
    part: Part,
    known: Mapping[str, bytes],
    shapes: Shapes,
    step: int,
    moments: Allocate,
    wanted: Collection[str] | None,
) -> Iterator[tuple[str, np.ndarray]]:
    """The part's wanted tensors as arrays of their own, verified: size and header first, then piece by piece."""
    key, start = object_key(part.digest), _begin(store, part, shapes, step)
    for name in part.tensors:
        size = 4 * int(np.prod(shapes[name], dtype=np.int64))
        if wanted is not None and name not in wanted:
            start += size
            continue
        array = (zeros if name.startswith("weights/") else moments)(shapes[name])
        rows, row_bytes = _piece_rows(shapes[name]), array.nbytes // array.shape[0]
        for first in range(0, array.shape[0], rows):
            piece = _Piece(name, array[first : first + rows], first, known[name], start + first * row_bytes)
            sound(store, key, partial(_fill, key=key, piece=piece, step=step))
        yield name, array
        start += size


def _begin(store: Store, part: Part, shapes: Shapes, step: int) -> int:
    """Where the part's tensors begin, behind its header; its header and size are verified."""
    key, header = object_key(part.digest), safetensors_header(part.tensors, shapes)
    size = len(header) + sum(4 * int(np.prod(shapes[name], dtype=np.int64)) for name in part.tensors)
    sound(store, key, lambda copy: _check_header(copy, key, header, size, step))
    return len(header)


@dataclass(frozen=True)
class _Piece:
    """Whole leaves of a tensor: where they go, their first row, the tensor's leaf digests, their place in the part."""

    name: str
    into: np.ndarray
    first: int
    known: bytes
    at: int


def _piece_rows(shape: tuple[int, ...]) -> int:
    """Rows of as many whole leaves as PIECE_BYTES has room for, and of one at least."""
    rows = leaf_rows(shape, 4)
    return rows * max(1, PIECE_BYTES // (4 * rows * int(np.prod(shape[1:], dtype=np.int64))))


def _check_header(store: Store, key: str, header: bytes, size: int, step: int) -> None:
    where = f"checkpoint {step}, {store.uri}: {key}"
    if (found := store.size(key)) != size:
        raise _fault(step, f"{where} holds {found} bytes, expected {size}", _remove(step, key))
    if store.read_range(key, 0, len(header)) != header:
        raise _fault(step, f"{where}: the header is not that of its tensors", _remove(step, key))


def _fill(store: Store, key: str, piece: _Piece, step: int) -> None:
    """Read the piece to its place and compare its leaves there: what is used is what was verified."""
    data = store.read_range(key, piece.at, piece.into.nbytes)
    piece.into[...] = np.frombuffer(data, "<f4").reshape(piece.into.shape)
    rows, found = leaf_rows(piece.into.shape, 4), leaves(piece.into)
    before = piece.first // rows
    expected = piece.known[LEAF * before :][: len(found)]
    if found == expected:
        return
    index = next(i for i in range(len(found) // LEAF) if found[LEAF * i :][:LEAF] != expected[LEAF * i :][:LEAF])
    last = min(len(piece.into), (index + 1) * rows) - 1
    raise _fault(
        step,
        f"checkpoint {step}, {store.uri}: {key}: tensor {piece.name}, leaf {before + index} "
        f"(rows {piece.first + index * rows} to {piece.first + last}) has digest "
        f"{found[LEAF * index :][:LEAF].hex()}, expected {expected[LEAF * index :][:LEAF].hex()}",
        _remove(step, key),
    )


def _remove(step: int, key: str) -> str:
    return (
        f"fetch it again from its publisher; or, in your own run, rm {checkpoint_key(step)} {key} and train again: "
        "it replays from the checkpoint before"
    )


def _load_leaves(store: Store, manifest: Manifest, shapes: Shapes) -> dict[str, bytes]:
    """Leaf digests by tensor, proven against the manifest's tensor digests."""
    key, step = object_key(manifest.leaves), manifest.step
    counts = {name: -(-shape[0] // leaf_rows(shape, 4)) for name, shape in shapes.items()}
    found, expected = store.size(key), LEAF * sum(counts.values())
    if found != expected:
        raise _fault(step, f"checkpoint {step}: {key} holds {found} bytes, expected {expected}", _remove(step, key))
    data, start, known = store.read(key), 0, {}
    for name, count in counts.items():
        known[name], start = data[start : start + LEAF * count], start + LEAF * count
        like = np.broadcast_to(np.float32(0), shapes[name])
        if tensor_digest(name, like, known[name]) != manifest.tensors[name]:
            raise _fault(step, f"checkpoint {step}: {key}: the leaf digests of {name} are wrong", _remove(step, key))
    return known


def put_object(store: Store, data: Data) -> str:
    """Write a content-addressed object; its digest."""
    digest = object_digest(data)
    create_same(store, object_key(digest), data)
    return digest
