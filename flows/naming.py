"""Names and tags of flow runs in the UI's lists: what is done to which run and step, without folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from prefect import get_client, tags
from prefect.runtime import flow_run


def named(verb: str, *parameters: str) -> Callable[[], str]:
    """A `flow_run_name`: the verb and the run that the first of these parameters with a value names: "train demo"."""

    def name() -> str:
        return f"{verb} {short(next(filter(None, map(flow_run.parameters.get, parameters)), ''))}"

    return name


def short(path: str) -> str:
    """The run that a recipe, its folder or its published copy belongs to: runs/demo/published -> demo."""
    parts = [part for part in Path(path.removesuffix(".yaml")).parts if part != "published"]
    return parts[-1] if parts else path


@contextmanager
def tagged(path: str, *further: str) -> Iterator[None]:
    """Tag this flow run, and all that is called within the block, with the run that `path` belongs to, and more."""
    names = {f"run:{short(path)}", *further}
    if flow_run.id:
        with get_client(sync_client=True) as client:
            before = client.read_flow_run(UUID(flow_run.id)).tags
            client.update_flow_run(UUID(flow_run.id), tags=names.union(before))
    with tags(*names):
        yield
