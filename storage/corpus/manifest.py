"""The manifest: one canonical JSON of what the mix is (`mix`, under the mix root) and how it is stored (`files`).

    window leaf     BLAKE3("window", the window's little-endian ids, all of `dtype`)
    shard           BLAKE3("shard", its leaves in order)
    windows root    BLAKE3("windows", the shards' digests in order)         one for training, one held out, per source
    held-out root   BLAKE3("held out", canonical JSON {source: its held-out windows root})
    mix root        BLAKE3("mix", canonical JSON of `mix`, which holds the shards' digests and the held-out root)

What depends on a library's file format (an Arrow header, a Parquet writer's name) is in `files` and under no root.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from kernels import canonical
from kernels.digest import digest
from model.spec import Spec
from storage.corpus.mixture import Mixture
from storage.corpus.spec import MAX_BLOCK, MixSpec
from storage.errors import InputFault
from storage.records import Digest, first
from storage.store import Store, object_digest

KEY = "manifest.json"
FORMAT: Literal["verbatim mix 1"] = "verbatim mix 1"


class Shard(Spec):
    """`windows` consecutive windows of a source; `digest` is over their leaves."""

    windows: int = Field(ge=1)
    digest: Digest


class Windows(Spec):
    """A token stream cut into windows: tokens = windows * window_tokens + tail (the tail is in no window)."""

    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    windows: int = Field(ge=1)
    tail: int = Field(ge=0)
    shards: Annotated[tuple[Shard, ...], Field(strict=False)]

    def check(self, spec: MixSpec) -> None:
        """ValueError unless the shards hold the windows as `spec` cuts them."""
        starts = range(0, self.windows, spec.shard_windows)  # a range, since a hostile count must allocate nothing
        if len(self.shards) != -(-self.windows // spec.shard_windows) or any(
            shard.windows != min(spec.shard_windows, self.windows - start)
            for shard, start in zip(self.shards, starts, strict=False)
        ):
            raise ValueError(f"shards do not hold {self.windows} windows in shards of {spec.shard_windows}")
        if self.tokens != self.windows * spec.window_tokens + self.tail:
            raise ValueError(f"{self.windows} windows and a tail of {self.tail} are not {self.tokens} tokens")

    @property
    def root(self) -> str:
        return digest(b"".join(bytes.fromhex(shard.digest) for shard in self.shards), "windows")


class SourceManifest(Spec):
    """Counts of one source; `skipped`: rows that are no documents, by reason."""

    name: str
    text_bytes: int
    skipped: dict[str, int]
    train: Windows
    held_out: Windows


class TokenizerManifest(Spec):
    """tokenizer.json by its object digest; the id that ends a text."""

    digest: Digest
    vocab: int = Field(ge=1)
    end_of_text: int = Field(ge=0)


class Mix(Spec):
    """All that the mix root covers.

    counts: the sources' windows in every block of the stream; next_pass: at which window of the stream each source
    begins its second pass.
    """

    format: Literal["verbatim mix 1"] = FORMAT
    spec: MixSpec
    tokenizer: TokenizerManifest
    dtype: Literal["uint16", "uint32"]
    window_tokens: int
    sources: Annotated[tuple[SourceManifest, ...], Field(strict=False)]
    counts: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
    next_pass: dict[str, int]
    held_out_root: Digest

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [source.name for source in self.spec.sources]
        if [source.name for source in self.sources] != names or len(self.counts) != len(names):
            raise ValueError(f"the sources and counts are not those of the spec's sources {names}")
        if self.window_tokens != self.spec.window_tokens or sum(self.counts) > MAX_BLOCK:
            raise ValueError(f"windows of {self.window_tokens} tokens, blocks of {sum(self.counts)}: not the spec's")
        for source in self.sources:
            source.train.check(self.spec)
            source.held_out.check(self.spec)
        return self


class StoredFile(Spec):
    """An object of the mix store: its digest and size in bytes, and for an Arrow file where its rows begin."""

    digest: Digest
    size: int = Field(ge=0)
    rows_at: int = Field(default=0, ge=0)


class Manifest(Spec):
    """manifest.json. `root` is the mix root; `files` are by key."""

    root: Digest
    mix: Mix
    files: dict[str, StoredFile]

    @classmethod
    def of(cls, mix: Mix, files: dict[str, StoredFile]) -> Self:
        return cls(root=mix_root(mix), mix=mix, files=files)

    @property
    def held_out_root(self) -> str:
        return self.mix.held_out_root

    @property
    def mixture(self) -> Mixture:
        return Mixture(
            seed=self.mix.spec.seed,
            names=tuple(source.name for source in self.mix.sources),
            windows=tuple(source.train.windows for source in self.mix.sources),
            counts=self.mix.counts,
        )

    def to_bytes(self) -> bytes:
        return canonical.dumps(self.model_dump(mode="json"))


def mix_root(mix: Mix) -> str:
    return digest(canonical.dumps(mix.model_dump(mode="json")), "mix")


def held_out_root(sources: tuple[SourceManifest, ...]) -> str:
    return digest(canonical.dumps({source.name: source.held_out.root for source in sources}), "held out")


def read_manifest(store: Store, base: str = "", root: str | None = None, digest: str | None = None) -> Manifest:
    """The manifest at `base` + manifest.json, consistent in itself, and with this mix root and this digest of the whole
    object, if they are given: the root covers what the mix is, not where its rows lie."""
    key = base + KEY
    try:
        manifest = Manifest.model_validate(canonical.loads(store.read(key, digest, limit=1 << 30)))
    except (canonical.NotCanonical, ValidationError) as error:
        why = first(error) if isinstance(error, ValidationError) else error
        raise InputFault(f"{store.uri}: {key} is not a manifest: {why}", cause="damaged or another version") from None
    _same(store, key, "mix root", mix_root(manifest.mix), manifest.root if root is None else root)
    _same(store, key, "mix root", manifest.root, mix_root(manifest.mix))
    _same(store, key, "held-out root", manifest.held_out_root, held_out_root(manifest.mix.sources))
    return manifest


def stored(data: bytes, rows_at: int = 0) -> StoredFile:
    return StoredFile(digest=object_digest(data), size=len(data), rows_at=rows_at)


def _same(store: Store, key: str, what: str, found: str, expected: str) -> None:
    if found != expected:
        raise InputFault(
            f"{store.uri}: {key} has {what} {found}, expected {expected}",
            cause="the manifest was changed, or it is another mix's",
            next_step="fetch it again from where the mix was published",
        )
