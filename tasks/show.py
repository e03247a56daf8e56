"""What the UI shows of a result: the result first, then what follows from it, with links to where it lies."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from prefect.artifacts import create_markdown_artifact

REPORTS = "VERBATIM_REPORTS"  # address at which the pages of published runs are served, set by `make serve`
PAGE = "index.html"
LONGEST = 200_000  # characters of one artifact


def result(key: str, headline: str, facts: Iterable[str], rest: str = "") -> None:
    """A markdown artifact: the headline in bold, which is also what lists of artifacts show, facts, more markdown."""
    text = f"**{headline}**\n\n" + "".join(f"- {fact}\n" for fact in facts) + (f"\n{rest}\n" if rest else "")
    create_markdown_artifact(text[:LONGEST], key=key, description=headline)


def link(uri: str) -> str:
    """Markdown that leads to a published run: its page and its store, or the bare address where no browser gets it."""
    served = os.environ.get(REPORTS)
    if "://" in uri or not served:
        return f"`{uri}`"
    return f"[report]({served}{quote(uri)}/{PAGE}), store `{uri}`"


def page_link(file: Path) -> str:
    """Markdown that leads to a page on this machine, or its path where no browser gets it."""
    served = os.environ.get(REPORTS)
    return f"[{file.name}]({served}{quote(str(file))})" if served else f"`{file}`"


def picture(svg: str, text: str) -> str:
    """An SVG within markdown: no file has to be kept for it, and no other address is asked."""
    return f"![{text}](data:image/svg+xml;base64,{b64encode(svg.encode()).decode()})" if svg else ""
