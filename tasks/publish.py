"""Task of publishing: copy, read back, sign."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.audit.keys import load_key
from storage.copying import PublishProgress
from storage.publish import publish
from storage.release import ReleaseBody
from storage.store import open_store
from tasks import show
from tasks.progress import Progress
from tasks.references import KEYS, Published, key_name


@task(task_run_name="publish to {target}", cache_policy=NO_CACHE)
def publish_run(run: str, mix: str, target: str, records: str = "") -> Published:
    """Idempotent: objects that are there already are compared, not copied again."""
    progress = Progress("Publish", key_name("publish", Path(run).parent.name), 1, "objects")

    def report(done: PublishProgress) -> None:
        progress.total = done.of_objects
        moved = f"{done.bytes / 1e6:,.0f} of {done.of_bytes / 1e6:,.0f} MB"
        progress(done.objects, f"{moved}, {done.rate / 1e6:,.1f} MB/s")

    key, kept = load_key(KEYS, "trainer"), open_store(records) if records else None
    done = publish(open_store(run), open_store(mix), open_store(target), key, kept, report)
    body = done.release
    show.result(
        "release",
        f"{body.steps} steps published and read back: {len(body.objects)} objects, {done.size / 1e6:,.0f} MB",
        (
            show.link(target),
            f"run id `{body.run}`",
            f"ledger head `{body.head}`",
            f"trajectory root `{body.trajectory_root}`",
        ),
        f"| class | objects | bytes |\n|---|--:|--:|\n{_classes(body)}",
    )
    return Published(
        uri=target, run_id=body.run, steps=body.steps, objects=len(body.objects), copied=done.copied, size=done.size
    )


def _classes(body: ReleaseBody) -> str:
    return "".join(f"| {name} | {group.count:,} | {group.bytes:,} |\n" for name, group in body.classes.items())
