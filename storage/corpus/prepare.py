"""Prepare a mix: verified files → documents → tokenizer → windows, index and manifest in a store.

Nothing is written until every source is known to fill its windows. Then made-with.json, the tokenizer and, source by
source, the windows are created; a finished source is recorded in parts/sources/<source>.json, and manifest.json comes
last. A second call takes up finished sources, after verifying all their objects, and writes what is missing: the same
bytes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kernels import canonical
from kernels.digest import digest
from model.spec import Spec
from storage.corpus import made_with
from storage.corpus.documents import Documents, collect, shuffled
from storage.corpus.fetch import pinned_files, read_pinned
from storage.corpus.index_file import index_key
from storage.corpus.manifest import (
    FORMAT,
    KEY,
    Manifest,
    Mix,
    Shard,
    SourceManifest,
    StoredFile,
    TokenizerManifest,
    Windows,
    held_out_root,
    stored,
)
from storage.corpus.mixture import Mixture, largest_remainder
from storage.corpus.pack import Packed, Part, pack
from storage.corpus.part_index import part_index
from storage.corpus.spec import MixSpec, PinnedTokenizer
from storage.corpus.tokens import Tokens, train
from storage.errors import InputFault, UsageError
from storage.store import Store, create_same, object_digest
from storage.windows import shard_objects, stored_shard

TOKENIZER = "tokenizer.json"
TOKENIZER_PART = "parts/tokenizer.json"

PartT = TypeVar("PartT", bound=Spec)

Progress = Callable[[str, int, int], None]  # (what, how many are done, of how many)


class TokenizerPart(Spec):
    """parts/tokenizer.json: the tokenizer that was trained for the mix spec with the digest `made_from`."""

    made_from: str
    digest: str


class SourcePart(Spec):
    """parts/sources/<source>.json: a finished source. `made_from` digests everything that decided it."""

    made_from: str
    source: SourceManifest
    files: dict[str, StoredFile]


def prepare(spec: MixSpec, cache: Path, store: Store, progress: Progress = lambda what, done, total: None) -> Manifest:
    """Prepare the mix of `spec` in `store` and return its manifest; downloads go to the folder `cache`.

    Raises InputFault (a file differs from its pin, a source is empty or too small, the store holds another mix),
    Refused (a source that is pinned but cannot be fetched yet), StorageError. All pinned files are verified every time.
    """
    _fetch(spec, cache, progress)
    collected: dict[str, Documents] = {}
    tokens = _tokenizer(spec, cache, store, collected, progress)
    made_from = _made_from(spec, tokens.digest)
    parts: dict[str, SourcePart] = {}
    packed: dict[str, tuple[Documents, Packed]] = {}
    for name in (source.name for source in spec.sources):
        finished = _finished(name, made_from, store)
        if finished is not None:
            parts[name] = finished
            continue
        documents = collected.pop(name, None) or _collect(spec, name, cache, progress)
        packed[name] = documents, _pack(spec, name, documents, tokens, progress)
    windows = {name: part.source.train.windows for name, part in parts.items()}
    counts = _counts(spec, windows | {name: both[1].train.count for name, both in packed.items()})
    if TOKENIZER not in store.list(TOKENIZER):  # else an earlier call began this mix, with what it had
        made_with.record(store)
    _write_tokenizer(spec, tokens, store)
    for name in sorted(packed):
        parts[name] = _write_source(spec, name, *packed[name], made_from, store, progress)
    manifest = _manifest(spec, tokens, counts, [parts[source.name] for source in spec.sources])
    create_same(store, KEY, manifest.to_bytes())
    return manifest


def _fetch(spec: MixSpec, cache: Path, progress: Progress) -> None:
    """Every pinned file is present and as pinned, before any work is done; the bytes are read again when used."""
    files = [file for source in spec.sources for file in pinned_files(source)]
    for number, file in enumerate(files):
        progress("fetch", number, len(files))
        read_pinned(file, cache)
    progress("fetch", len(files), len(files))


def _collect(spec: MixSpec, name: str, cache: Path, progress: Progress) -> Documents:
    (source,) = (source for source in spec.sources if source.name == name)
    return collect(source, cache, lambda done, total: progress(f"extract {name}", done, total))


def _tokenizer(spec: MixSpec, cache: Path, store: Store, collected: dict[str, Documents], progress: Progress) -> Tokens:
    """The pinned tokenizer, one that a former call trained, or one trained now: then `collected` has all documents."""
    if isinstance(spec.tokenizer, PinnedTokenizer):
        data = read_pinned(spec.tokenizer, cache)
        return Tokens(data, object_digest(data), spec.tokenizer.end_of_text)
    record = _read_part(store, TOKENIZER_PART, TokenizerPart)
    if record is not None and record.made_from == _made_from(spec) and TOKENIZER in store.list(TOKENIZER):
        return Tokens(store.read(TOKENIZER), record.digest, spec.tokenizer.special[0])
    for source in spec.sources:
        collected[source.name] = _collect(spec, source.name, cache, progress)
    progress("train tokenizer", 0, 1)
    data = train(spec.tokenizer, _sample(spec, spec.tokenizer.sample_bytes, collected))
    progress("train tokenizer", 1, 1)
    return Tokens(data, object_digest(data), spec.tokenizer.special[0])


def _sample(spec: MixSpec, sample_bytes: int, collected: dict[str, Documents]) -> Iterator[str]:
    """Whole documents in a keyed order of their own, from each source until its share of the bytes is reached."""
    total = sum(documents.text_bytes for documents in collected.values())
    for name, documents in collected.items():
        left = sample_bytes * documents.text_bytes // total
        for index in shuffled(spec.seed, name, len(documents), "tokenizer sample").tolist():
            if left <= 0:
                break
            left -= len(documents.texts[index].encode())
            yield documents.texts[index]


def _pack(spec: MixSpec, name: str, documents: Documents, tokens: Tokens, progress: Progress) -> Packed:
    progress(f"encode {name}", 0, 1)
    packed = pack(spec, name, documents, tokens)
    documents.texts.clear()  # only addresses are needed from here on
    progress(f"encode {name}", 1, 1)
    return packed


def _counts(spec: MixSpec, windows: dict[str, int]) -> tuple[int, ...]:
    """How many of a block's windows each source has; UsageError if one would have none."""
    names = [source.name for source in spec.sources]
    if spec.proportions is not None:
        return tuple(spec.proportions[name] for name in names)
    assert spec.block is not None  # the spec checks that one of the two is given
    counts = largest_remainder([windows[name] for name in names], spec.block)
    if 0 in counts:
        name = names[counts.index(0)]
        raise UsageError(
            f"source {name} has {windows[name]} of {sum(windows.values())} windows: none of a block of {spec.block}",
            cause="the block is too small for so small a source",
            next_step="raise block in the recipe, or give proportions",
        )
    return tuple(counts)


def _write_source(
    spec: MixSpec, name: str, documents: Documents, packed: Packed, made_from: str, store: Store, progress: Progress
) -> SourcePart:
    """Create the objects of one source, and its record last."""
    files: dict[str, StoredFile] = {}
    shards: dict[str, list[Shard]] = {"train": [], "held_out": []}
    for part, stream in (("train", packed.train), ("held_out", packed.held_out)):
        for shard, objects, rows_at in shard_objects(f"windows/{name}/{part}", stream.windows, spec.shard_windows):
            for key, data in objects.items():
                create_same(store, key, data)
            files |= stored_shard(objects, rows_at)
            shards[part].append(shard)
            progress(f"write {name}", sum(s.windows for s in shards[part]), stream.count)
        for number, data in enumerate(part_index(documents, stream, spec.shard_windows)):
            create_same(store, index_key(name, part, number), data)
            files[index_key(name, part, number)] = stored(data)
    source = SourceManifest(
        name=name,
        text_bytes=documents.text_bytes,
        skipped=documents.skipped,
        train=_windows(packed.train, shards["train"]),
        held_out=_windows(packed.held_out, shards["held_out"]),
    )
    record = SourcePart(made_from=made_from, source=source, files=files)
    create_same(store, _source_part(name), canonical.dumps(record.model_dump(mode="json")))
    return record


def _write_tokenizer(spec: MixSpec, tokens: Tokens, store: Store) -> None:
    create_same(store, TOKENIZER, tokens.data)
    record = TokenizerPart(made_from=_made_from(spec), digest=tokens.digest)
    create_same(store, TOKENIZER_PART, canonical.dumps(record.model_dump(mode="json")))


def _windows(part: Part, shards: list[Shard]) -> Windows:
    return Windows(
        documents=len(part.documents), tokens=len(part.ids), windows=part.count, tail=part.tail, shards=tuple(shards)
    )


def _manifest(spec: MixSpec, tokens: Tokens, counts: tuple[int, ...], parts: list[SourcePart]) -> Manifest:
    sources = tuple(part.source for part in parts)
    names, windows = tuple(s.name for s in sources), tuple(s.train.windows for s in sources)
    mixture = Mixture(spec.seed, names, windows, counts)
    mix = Mix(
        spec=spec.public(),
        tokenizer=TokenizerManifest(digest=tokens.digest, vocab=tokens.vocab, end_of_text=tokens.eot),
        dtype="uint16" if tokens.dtype.itemsize == 2 else "uint32",
        window_tokens=spec.window_tokens,
        sources=sources,
        counts=counts,
        next_pass={name: mixture.begins_pass(s, 1) for s, name in enumerate(names)},
        held_out_root=held_out_root(sources),
    )
    files = {TOKENIZER: stored(tokens.data)}
    for part in parts:
        files |= part.files
    return Manifest.of(mix, files)


def _finished(name: str, made_from: str, store: Store) -> SourcePart | None:
    """The record of a finished source, if all its objects are there; InputFault if one of them is damaged."""
    record = _read_part(store, _source_part(name), SourcePart)
    if record is None or record.made_from != made_from:
        return None
    present = set(store.list(f"windows/{name}/")) | set(store.list(f"docs/{name}/"))
    if not present.issuperset(record.files):
        return None
    for key, file in record.files.items():
        store.read(key, file.digest)
    return record


def _read_part(store: Store, key: str, kind: type[PartT]) -> PartT | None:
    if key not in store.list(key):
        return None
    try:
        return kind.model_validate(canonical.loads(store.read(key)))
    except (canonical.NotCanonical, ValidationError) as error:
        raise InputFault(f"{store.uri}: {key} is damaged: {error}", next_step="prepare in an empty folder") from error


def _made_from(spec: MixSpec, tokenizer: str = "") -> str:
    return digest(canonical.dumps([FORMAT, spec.digest(), tokenizer]), "mix part")


def _source_part(name: str) -> str:
    return f"parts/sources/{name}.json"
