"""Tasks of preparation: windows from pinned text, and the comparison of two mixes."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage import recipe as recipes
from storage.corpus.manifest import Manifest, read_manifest
from storage.corpus.prepare import prepare
from storage.errors import Divergence
from storage.store import open_store
from tasks.progress import Progress
from tasks.references import CACHE, Mix, key_name


@task(task_run_name="prepare the mix", cache_policy=NO_CACHE)
def prepare_mix(recipe: str, mix: str) -> Mix:
    """Fetch, check, extract, tokenize, cut. Idempotent: what a former call finished is verified and kept."""
    spec = recipes.load(recipe).mix
    progress = Progress("Prepare", key_name("prepare", Path(mix).parent.name), 1, "parts")
    manifest = prepare(spec, CACHE, open_store(mix), _Stages(progress, [source.name for source in spec.sources]))
    _show(manifest)
    train = manifest.mix.sources
    return Mix(
        uri=mix,
        mix_root=manifest.root,
        held_out_root=manifest.held_out_root,
        windows=sum(source.train.windows for source in train),
    )


class _Stages:
    """Counts finished stages: fetch, the tokenizer, and three for each source."""

    def __init__(self, progress: Progress, sources: list[str]) -> None:
        self._progress, self._done = progress, set[str]()
        progress.total = 2 + 3 * len(sources)
        progress.unit = "stages"

    def __call__(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self._done.add(what)
        self._progress(len(self._done), what)


def _show(manifest: Manifest) -> None:
    rows = [
        {
            "source": source.name,
            "text, MB": round(source.text_bytes / 1e6, 1),
            "tokens": source.train.tokens,
            "windows": source.train.windows,
            "held-out windows": source.held_out.windows,
        }
        for source in manifest.mix.sources
    ]
    create_markdown_artifact(f"Mix root `{manifest.root}`", key="mix-root", description="The digest of all windows")
    create_table_artifact(rows, key="mix-sources", description=f"Sources of mix {manifest.root[:16]}")


@task(task_run_name="compare the two mixes", cache_policy=NO_CACHE)
def compare_mixes(recorded: str, rebuilt: str) -> None:
    """Raises Divergence, naming the first source and part that differ, unless the two mix roots are equal."""
    first, second = read_manifest(open_store(recorded)), read_manifest(open_store(rebuilt))
    if first.root == second.root:
        create_markdown_artifact(f"**MATCH** mix root `{first.root}`", key="reproduced-mix")
        return
    raise Divergence(
        f"the rebuilt mix has root {second.root}, the recorded one {first.root}; first difference: "
        f"{_difference(first, second)}",
        cause="another recipe, or a library that cuts or encodes text differently",
        next_step=f"compare {recorded}/manifest.json with {rebuilt}/manifest.json",
    )


def _difference(first: Manifest, second: Manifest) -> str:
    for name in ("spec", "tokenizer", "dtype", "window_tokens"):
        if getattr(first.mix, name) != getattr(second.mix, name):
            return name
    for a, b in zip(first.mix.sources, second.mix.sources, strict=True):
        for part in ("train", "held_out"):
            for number, (x, y) in enumerate(zip(getattr(a, part).shards, getattr(b, part).shards)):
                if x != y:
                    return f"source {a.name}, {part} shard {number}"
        if a != b:
            return f"source {a.name}"
    return "the mixture's counts"
