"""Tasks of preparation: windows from pinned text, and the comparison of two mixes."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from storage import recipe as recipes
from storage.corpus import made_with
from storage.corpus.compare import first_difference
from storage.corpus.manifest import Manifest
from storage.corpus.prepare import prepare
from storage.errors import Divergence, UsageError
from storage.questions import open_mix
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
    return Mix(
        uri=mix,
        mix_root=manifest.root,
        held_out_root=manifest.held_out_root,
        windows=sum(source.train.windows for source in manifest.mix.sources),
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


@task(task_run_name="claim an empty folder", cache_policy=NO_CACHE)
def claim_folder(recorded: str, rebuilt: str) -> None:
    """Refused unless `rebuilt` is empty or a rebuild that this code began; UsageError if `recorded` is no other mix."""
    store = open_store(rebuilt)
    if open_mix(recorded).store.uri == store.uri:
        raise UsageError(
            f"{store.uri} would be compared with itself",
            next_step="give the recorded mix with --published, another folder for the new one with --folder",
        )
    made_with.claim(store)


@task(task_run_name="compare the two mixes", cache_policy=NO_CACHE)
def compare_mixes(recorded: str, rebuilt: str) -> None:
    """Raises Divergence, naming the first source, file and window that differ, unless the two mixes are the same."""
    first, second = open_mix(recorded), open_mix(rebuilt)
    if difference := first_difference(first, second):
        raise Divergence(
            f"the rebuilt mix has root {second.manifest.root}, the recorded one {first.manifest.root}; "
            f"first difference: {difference.what}",
            cause=difference.cause,
            next_step=f"compare the manifest.json of {recorded} with that of {rebuilt}",
        )
    create_markdown_artifact(f"**MATCH** mix root `{first.manifest.root}`", key="reproduced-mix")
