"""Prepare a mix: verified files → texts → tokenizer → sorted runs → shards of windows, their index, and the manifest.

    fetch      what is not of this machine comes into the cache                        (fetch_all.py)
    read       each file's texts become a piece                                        (read.py)
    number     documents get canonical numbers; duplicates are dropped                 (numbering.py)
    tokenizer  trained on a sample, or given                                           (sample.py, tokens.py)
    encode     texts become sorted runs of documents at their places                   (runs.py)
    lay out    held-out documents are chosen, places become tokens of two streams      (layout.py)
    write      each shard is cut out of the runs and created in the store              (shards.py)

Jobs of a stage run in any order on any number of processes. Pieces lie in a folder of the cache until manifest.json,
which comes last; a call that was interrupted is taken up from them. Nothing is written to the store until every source
is known to fill its windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import canonical
from kernels.digest import digest
from storage.corpus import made_with
from storage.corpus.fetch import pinned_files, read_pinned
from storage.corpus.fetch_all import FetchAll
from storage.corpus.layout import Stream, hold_out_everywhere, placed, streams
from storage.corpus.manifest import (
    KEY,
    Manifest,
    Mix,
    Shard,
    SourceManifest,
    TokenizerManifest,
    Windows,
    held_out_root,
    read_manifest,
    stored,
)
from storage.corpus.mixture import Mixture, largest_remainder
from storage.corpus.numbering import Numbered, number
from storage.corpus.parts import Parts
from storage.corpus.pool import Run, serially
from storage.corpus.read import Read
from storage.corpus.runs import Encode, runs
from storage.corpus.sample import sample
from storage.corpus.shards import Write, mapped, runs_name, shards, written
from storage.corpus.spec import MixSpec, PinnedTokenizer
from storage.corpus.tokens import TOKENIZER_PART, Tokens, TokensPart
from storage.errors import InputFault, Refused, UsageError
from storage.store import Store, create_same, object_digest

TOKENIZER = "tokenizer.json"
SORT_BYTES = 512 << 20

Progress = Callable[[str, int, int], None]  # (what, bytes done, of how many)


def prepare(
    spec: MixSpec,
    cache: Path,
    store: Store,
    progress: Progress = lambda what, done, total: None,
    run: Run = serially,
    workers: int = 1,
    sort_bytes: int = SORT_BYTES,
) -> Manifest:
    """Prepare the mix of `spec` in `store` and return its manifest; downloads and pieces go to the folder `cache`.

    run: carries out jobs, on so many `workers`; sort_bytes: what one of them may hold in memory to sort. Neither is an
    input of the result. Raises InputFault (a file differs from its pin, a source is empty or too small, the store holds
    another mix), UsageError (a filter or column that the rows do not have, too small a block), Refused (a source
    without pins, or another process prepares this mix), MachineFault (two tokenizer libraries disagree, a piece
    vanished), VerbatimError (no network, a lost worker), StorageError.
    """
    made_from = digest(canonical.dumps([spec.digest(), made_with.here().model_dump(mode="json")]), "mix part")
    folder = digest(canonical.dumps([made_from, store.uri]), "mix parts")
    parts = Parts(cache / f"parts-{folder[:16]}", made_from)
    if finished := _finished(spec, store, progress):
        if parts.folder.exists():  # a former call was killed while it removed them
            with suppress(Refused), parts.claimed():
                parts.remove()
        return finished
    mapped.cache_clear()  # of a former preparation in this process, whose pieces are gone or damaged
    with parts.claimed():
        manifest = _Preparation(spec, cache, store, parts, progress, run, workers, sort_bytes).manifest()
        create_same(store, KEY, manifest.to_bytes())
        parts.remove()
    return manifest


def _finished(spec: MixSpec, store: Store, progress: Progress) -> Manifest | None:
    """The manifest of this mix, if all its objects are there; InputFault if one is damaged, or it is another mix."""
    if KEY not in store.list(KEY):
        return None
    manifest = read_manifest(store)
    if manifest.mix.spec.digest() != spec.digest():
        raise InputFault(
            f"{store.uri} holds the mix of another recipe: its spec has digest {manifest.mix.spec.digest()}, this one "
            f"{spec.digest()}",
            cause="the recipe was changed after the mix was prepared, or the folder is another recipe's",
            next_step="choose an empty folder; nothing was overwritten",
        )
    if not set(manifest.files) <= set(store.list()):
        return None
    done, total = 0, sum(file.size for file in manifest.files.values())
    for key, file in manifest.files.items():
        progress("verify", done, total)
        store.read(key, file.digest)
        done += file.size
    progress("verify", done, total)
    return manifest


@dataclass(frozen=True)
class _Preparation:
    spec: MixSpec
    cache: Path
    store: Store
    parts: Parts
    progress: Progress
    run: Run
    workers: int
    sort_bytes: int

    def manifest(self) -> Manifest:
        """Every stage in turn."""
        pins = {source.name: pinned_files(source) for source in self.spec.sources}
        every = tuple({pin.sha256: pin for files in pins.values() for pin in files}.values())
        total = sum(pin.size for pin in every)
        self._do("fetch", [FetchAll(every, self.cache, lambda done: self.progress("fetch", done, total))])
        reads = {
            name: [Read(self.parts, self.spec.seed, name, i, pin, self.cache) for i, pin in enumerate(files)]
            for name, files in pins.items()
        }
        self._do("read", [job for jobs in reads.values() for job in jobs])
        sources = number(self.parts, self.spec, pins)
        tokens = self._tokenizer(sources)
        encoded = [runs(self.parts, self.spec.seed, s, tokens, self.sort_bytes, self.workers) for s in sources]
        self._do("encode", [job for jobs in encoded for job in jobs])
        laid_out = self._lay_out(sources, encoded)
        counts = self._counts([two["train"].windows for _, two in laid_out])
        self._begin(tokens)
        writes = [list(shards(self.parts, self.store, self.spec, name, two, tokens)) for name, two in laid_out]
        self._do("write", [job for jobs in writes for job in jobs])
        return self._manifest(tokens.open(), counts, sources, laid_out, writes)

    def _do(self, what: str, jobs: Sequence[Any]) -> None:
        """Carry out those that are not finished."""
        left = [job for job in jobs if not job.finished()]
        total = sum(job.size for job in jobs)
        done = total - sum(job.size for job in left)
        self.progress(what, done, total)
        if not left:
            return

        def tell(job: Any) -> None:
            nonlocal done
            done += job.size
            self.progress(what, done, total)

        self.run(what, left, tell)

    def _tokenizer(self, sources: list[Numbered]) -> TokensPart:
        """The pinned tokenizer, or one trained on a sample of the sources."""
        chosen = self.spec.tokenizer
        if isinstance(chosen, PinnedTokenizer):
            data = read_pinned(chosen, self.cache)
            part = TokensPart(self.parts, object_digest(data), chosen.end_of_text)
            Tokens(data, part.digest, part.end_of_text)  # InputFault unless it is one
            self.parts.write(TOKENIZER_PART, {"json": data.decode()})
            return part
        self._do("tokenizer", [sample(self.parts, chosen, self.spec.seed, sources)])
        data = self.parts.about(TOKENIZER_PART)["json"].encode()
        return TokensPart(self.parts, object_digest(data), chosen.special[0])

    def _lay_out(self, sources: list[Numbered], encoded: list[list[Encode]]) -> list[tuple[str, dict[str, Stream]]]:
        found = [placed(self.parts, self.spec, s.source, jobs) for s, jobs in zip(sources, encoded, strict=True)]
        hold_out_everywhere(found)
        for source, jobs in zip(sources, encoded, strict=True):
            listed = [[job.name, self.parts.digest(job.name)] for job in jobs]
            about = {"runs": listed, "files": [file.name for file in source.files]}
            self.parts.write(runs_name(source.source), about)
        return [(source.source, streams(self.spec, source)) for source in found]

    def _counts(self, windows: list[int]) -> tuple[int, ...]:
        """How many of a block's windows each source has; UsageError if one would have none."""
        names = [source.name for source in self.spec.sources]
        if self.spec.proportions is not None:
            return tuple(self.spec.proportions[name] for name in names)
        assert self.spec.block is not None  # the spec checks that one of the two is given
        counts = largest_remainder(windows, self.spec.block)
        if 0 in counts:
            none = counts.index(0)
            raise UsageError(
                f"source {names[none]} has {windows[none]} of {sum(windows)} windows: none of a block of "
                f"{self.spec.block}",
                cause="the block is too small for so small a source",
                next_step="raise block in the recipe, or give proportions",
            )
        return tuple(counts)

    def _begin(self, tokens: TokensPart) -> None:
        """The first objects of the store."""
        made_with.record(self.store)
        create_same(self.store, TOKENIZER, tokens.open().data)

    def _manifest(
        self,
        tokens: Tokens,
        counts: tuple[int, ...],
        sources: list[Numbered],
        laid_out: list[tuple[str, dict[str, Stream]]],
        writes: list[list[Write]],
    ) -> Manifest:
        entries: list[SourceManifest] = []
        files = {TOKENIZER: stored(tokens.data)}
        for source, (_, two), jobs in zip(sources, laid_out, writes, strict=True):
            parts: dict[str, list[Shard]] = {"train": [], "held_out": []}
            for job in jobs:
                shard, made = written(self.parts, job.name)
                parts[job.part].append(shard)
                files |= made
            train, held_out = (_windows(two[part], parts[part]) for part in ("train", "held_out"))
            entries.append(
                SourceManifest(
                    name=source.source,
                    text_bytes=source.text_bytes,
                    skipped=source.skipped,
                    train=train,
                    held_out=held_out,
                )
            )
        return Manifest.of(_mix(self.spec, tokens, counts, tuple(entries)), files)


def _windows(stream: Stream, shards: list[Shard]) -> Windows:
    return Windows(
        documents=len(stream.places),
        tokens=stream.tokens,
        windows=stream.windows,
        tail=stream.tail,
        shards=tuple(shards),
    )


def _mix(spec: MixSpec, tokens: Tokens, counts: tuple[int, ...], sources: tuple[SourceManifest, ...]) -> Mix:
    names, windows = tuple(s.name for s in sources), tuple(s.train.windows for s in sources)
    mixture = Mixture(spec.seed, names, windows, counts)
    return Mix(
        spec=spec.public(),
        tokenizer=TokenizerManifest(digest=tokens.digest, vocab=tokens.vocab, end_of_text=tokens.eot),
        dtype="uint16" if tokens.dtype.itemsize == 2 else "uint32",
        window_tokens=spec.window_tokens,
        sources=sources,
        counts=counts,
        next_pass={name: mixture.begins_pass(s, 1) for s, name in enumerate(names)},
        held_out_root=held_out_root(sources),
    )
