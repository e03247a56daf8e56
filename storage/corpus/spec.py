"""MixSpec: everything that decides a bit of the data stream, and nothing else.

A source is a list of files, each pinned by name, version, size and sha256 and each with the way its documents are taken
out of it. There is no field that loosens a pin.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from kernels import canonical
from kernels.digest import digest
from model.spec import Spec
from storage.corpus.where import Type, columns_of
from storage.records import Digest

MAX_BLOCK = 65_536  # slots of a mixture block: its table stays small enough to be recomputed on demand
MAX_SAMPLE = 2**30  # bytes: the trainer counts pairs in 32 bits, a pair needs a byte, and the last text may overshoot
MAX_RESERVED = 1 << 20  # held-out windows of one source


def _slash(path: str) -> str:
    return path.replace("\\", "/")


Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
Globs = Annotated[tuple[str, ...], Field(strict=False)]
Path_ = Annotated[str, AfterValidator(_slash)]


class Allowed(Spec):
    """A row is kept if its `column` (a.b: field b of column a) is one of `values`, or a list of nothing but those."""

    column: str
    values: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Text(Spec):
    """Each member of an archive (or the file itself) whose name matches a glob is one document of UTF-8 text.

    A glob is for the whole name; its `*` stands for "/" too. The other members are counted as "not selected".
    An archive is a zip, a tar or a Debian package; a file that ends in .txt.gz or .txt.zst is unpacked.
    """

    kind: Literal["text"] = "text"
    include: Globs = ("*",)
    exclude: Globs = ()


class Botocore(Spec):
    """AWS service descriptions in a botocore wheel: a document for each service and each operation, HTML removed."""

    kind: Literal["botocore"] = "botocore"


class Factbook(Spec):
    """Country profiles of the CIA World Factbook in JSON: a document for each country, HTML removed."""

    kind: Literal["factbook"] = "factbook"


class WordNet(Spec):
    """WordNet's dict/data.{noun,verb,adj,adv}: a document for each gloss, after the words that it explains."""

    kind: Literal["wordnet"] = "wordnet"


class Metamath(Spec):
    """Metamath databases (members that match a glob): a document for each comment at a line's begin and what follows.

    Databases of one package have different licences, so which of them are meant has no default.
    """

    kind: Literal["metamath"] = "metamath"
    include: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Filtered(Spec):
    """Which rows are kept. A row that is not is counted as "filtered", "licence" or "language", the first that holds.

    `where` is a DuckDB SQL expression over the row's columns; NULL is no. A Parquet file has its own types; the columns
    of JSON rows that the expression reads are given theirs in `columns`, and a row with a value of another type is
    "malformed". `licences` and `languages` keep the rows that name an allowed one.
    """

    where: str | None = None
    columns: dict[str, Type] = Field(default_factory=dict)
    licences: Allowed | None = None
    languages: Allowed | None = None

    @model_validator(mode="after")
    def _reads(self) -> Self:
        read = columns_of(self.where) if self.where is not None else ()
        if self.columns and set(self.columns) != set(read):
            raise ValueError(f"columns gives types of {sorted(self.columns)}; where reads {sorted(read)}")
        return self


class Rows(Filtered):
    """Each row of a .parquet, .jsonl, .jsonl.gz or .jsonl.zst file is a document: its column `text`."""

    kind: Literal["rows"] = "rows"
    text: str = "text"


class SoftwareHeritage(Filtered):
    """Each row that is kept names a blob of Software Heritage's archive, by its sha1, and its encoding: the document.

    It is fetched from the archive's public store. A blob that is missing or differs is an error, and never skipped.
    """

    kind: Literal["software_heritage"] = "software_heritage"
    blob: str = "blob_id"
    encoding: str = "src_encoding"


Extract = Annotated[
    Text | Botocore | Factbook | WordNet | Metamath | Rows | SoftwareHeritage, Field(discriminator="kind")
]


class Pin(Spec):
    """What every pin of one file says; `size` in bytes."""

    sha256: Digest
    size: int = Field(ge=0)


class PyPIFile(Pin):
    """A wheel or source distribution of `package` ("name==version") in the Python package index."""

    kind: Literal["pypi"]
    package: str = Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._!+-]+$")
    format: Literal["wheel", "sdist"]
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return f"{self.package} {self.format}"


class NpmFile(Pin):
    """The tarball of `package` ("name@version") in the registry that npm is configured with."""

    kind: Literal["npm"]
    package: str = Field(pattern=r"^(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@\d+\.\d+\.\d+([-+][A-Za-z0-9.+-]+)?$")
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return self.package


class DebianFile(Pin):
    """The .deb of `package` ("name=version") for every architecture, from the mirror that apt is configured with."""

    kind: Literal["debian"]
    package: str = Field(pattern=r"^[a-z0-9][a-z0-9+.-]+=[0-9][A-Za-z0-9.+:~-]*$")
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return self.package


class LocalFile(Pin):
    """A file of this machine. Its last name is its address in the mix: the folder is no part of the result."""

    kind: Literal["local"]
    path: Path_
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return PurePath(self.path).name


class UrlFile(Pin):
    """A file of a web server or an s3 store, by its lasting address: one without a password, a query or a fragment."""

    kind: Literal["url"]
    url: str = Field(pattern=r"^(https?|s3)://[^/\s]+/\S+$")
    licence: str
    extract: Extract

    @field_validator("url")
    @classmethod
    def _lasting(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("the address is published with the mix, so it has no password, no query and no fragment")
        return url

    @property
    def name(self) -> str:
        return self.url


DataSet = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
HubPath = Annotated[str, Field(pattern=r"^[^/\x00-\x1f\\][^\x00-\x1f\\]*$")]


class HubFile(Pin):
    """A file of a Hugging Face data set at one commit."""

    kind: Literal["hub"]
    dataset: DataSet
    revision: Commit
    file: HubPath
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return f"{self.dataset}@{self.revision}/{self.file}"


class FileList(Pin):
    """A file of this machine that pins the files of a data set: canonical JSON, a list of {file, sha256, size}."""

    path: Path_


class HubFiles(Spec):
    """The files of a Hugging Face data set whose path matches a glob, each pinned by `pins`; without them, refused."""

    kind: Literal["hub_files"]
    dataset: DataSet
    revision: Commit
    include: Globs = ("*",)
    pins: FileList | None = None
    licence: str
    extract: Extract

    @property
    def name(self) -> str:
        return f"{self.dataset}@{self.revision}/{','.join(self.include)}"


PackageFile = PyPIFile | NpmFile | DebianFile
PinnedFile = PackageFile | LocalFile | UrlFile | HubFile
File = Annotated[PinnedFile | HubFiles, Field(discriminator="kind")]


class SourceSpec(Spec):
    """One kind of text. The order of `files` plays no part: they are sorted by name."""

    name: Name
    files: Annotated[tuple[File, ...], Field(strict=False, min_length=1)]

    @field_validator("files")
    @classmethod
    def _sorted(cls, files: tuple[File, ...]) -> tuple[File, ...]:
        ordered = tuple(sorted(files, key=lambda file: file.name))
        _unique("file", [file.name for file in ordered])
        return ordered


class TrainTokenizer(Spec):
    """Byte-level BPE with `vocab` ids trained on the mix; `special` take the first ids, the first of them ends a text.

    `sample_bytes` of UTF-8 are drawn from the sources in proportion to their size (whole documents).
    """

    kind: Literal["train"] = "train"
    vocab: int = Field(ge=257, le=1 << 24)
    special: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = ("<|endoftext|>",)
    sample_bytes: int = Field(ge=1, le=MAX_SAMPLE)

    @model_validator(mode="after")
    def _room(self) -> Self:
        _unique("special token", list(self.special))
        if self.vocab < 256 + len(self.special):
            raise ValueError(f"vocab is {self.vocab}; it needs the 256 bytes and {len(self.special)} special tokens")
        return self


class PinnedTokenizer(Pin):
    """A tokenizer.json file of this machine, of the `tokenizers` library's format."""

    kind: Literal["pinned"]
    path: Path_
    end_of_text: str = "<|endoftext|>"


Tokenizer = Annotated[TrainTokenizer | PinnedTokenizer, Field(discriminator="kind")]


class MixSpec(Spec):
    """The mix. A window holds seq_len + 1 tokens; `held_out_windows` are reserved in each source.

    Of every `block` windows of the stream each source has a fixed number: by largest remainder of the sources' window
    counts (all are read at the same rate), or as `proportions` says, whose sum is then the block. Of texts with the
    same bytes, anywhere in the mix, `duplicates: drop` keeps the first.
    """

    seed: int = Field(ge=0, lt=2**63)
    # Said only where something is dropped: it came after the first mixes, and their roots stay.
    duplicates: Literal["keep", "drop"] = Field(default="keep", exclude_if=lambda value: value == "keep")
    seq_len: int = Field(ge=1, le=1 << 20)
    shard_windows: int = Field(ge=1, le=1 << 20)
    held_out_windows: int = Field(ge=1, le=MAX_RESERVED)
    block: int | None = Field(default=None, ge=1, le=MAX_BLOCK)
    proportions: dict[str, Annotated[int, Field(ge=1)]] | None = None
    tokenizer: Tokenizer
    sources: Annotated[tuple[SourceSpec, ...], Field(strict=False, min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [source.name for source in self.sources]
        _unique("source", names)
        if (self.block is None) == (self.proportions is None):
            raise ValueError("give either block (proportions follow the sources' sizes) or proportions, not both")
        if self.proportions is not None:
            if sorted(self.proportions) != sorted(names):
                raise ValueError(
                    f"proportions are given for {sorted(self.proportions)}, the sources are {sorted(names)}"
                )
            if sum(self.proportions.values()) > MAX_BLOCK:
                raise ValueError(
                    f"proportions sum to {sum(self.proportions.values())}; at most {MAX_BLOCK} are allowed"
                )
        return self

    @property
    def window_tokens(self) -> int:
        return self.seq_len + 1

    def public(self) -> MixSpec:
        """The spec as it stands in the manifest: without the folders of local files."""
        return MixSpec.model_validate(_without_folders(self.model_dump(mode="json")))

    def digest(self) -> str:
        return digest(canonical.dumps(self.public().model_dump(mode="json")), "mix spec")


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: PurePath(v).name if k == "path" else _without_folders(v) for k, v in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, list) else value


def _unique(what: str, names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{what} {twice[0]!r} is named twice; names are addresses and must differ")
