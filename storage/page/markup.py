"""HTML in small pieces. Whatever comes from a record, a key or a file of names goes through text() or href()."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar
from urllib.parse import quote

from storage.errors import printable

T = TypeVar("T")
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)(?:T(\d\d:\d\d):\d\dZ)?", re.ASCII)
LISTED = 60  # rows of a list that are shown; of more, the first and the last


@dataclass(frozen=True)
class Place:
    """What the page leads to. sizes: bytes of each object by key, None where nobody asked.

    base: how a link begins that leads from the page to a key; None where a browser cannot follow one, as to s3://.
    code: digest of the archived code, "" without. signed: whether the trainer's signature of the list was checked.
    """

    sizes: Mapping[str, int | None]
    base: str | None = ""
    code: str = ""
    signed: bool = False

    def link(self, key: str, label: str = "") -> str:
        """The label, or the key, leading to the object if it is there."""
        shown = text(label or key)
        if self.base is None or key not in self.sizes:
            return shown
        return f'<a href="{escape(self.base + quote(key))}">{shown}</a>'


def text(value: object) -> str:
    """A value as text of HTML, of an element or in a quoted attribute; what steers is escaped."""
    return escape(printable(str(value)))


def name(value: object) -> str:
    """A stranger's name, which changes the direction of no other text."""
    return f"<bdi>{text(value)}</bdi>"


def code(value: object) -> str:
    """A digest, a key."""
    return f"<code>{text(value)}</code>"


def begun(digest: str) -> str:
    """A digest or key by its first digits, which are not broken over two lines."""
    return f'<code class="whole">{text(digest[:16])}</code>'


def moment(value: str) -> str:
    """A date or time to the minute as records hold it; whatever else stands there, as a stranger's text."""
    match = _MOMENT.fullmatch(value)
    return f"<time>{match[1]}{' ' + match[2] if match[2] else ''}</time>" if match else name(value)


def section(anchor: str, title: str, *parts: str) -> str:
    """A part of the page with its heading; "" if there is nothing in it."""
    inner = "\n".join(part for part in parts if part)
    return f'<section id="{anchor}"><h2>{title}</h2>\n{inner}</section>' if inner else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already, which a narrow screen shows as cards. numbers: columns of figures."""
    titles = enumerate(heads)
    head = "".join(f'<th scope="col" role="columnheader"{_kind(i, numbers)}>{title}</th>' for i, title in titles)
    body = "".join(f'<tr role="row">{_cells(heads, row, numbers)}</tr>' for row in rows)
    return (
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table>'
    )


def _cells(heads: Sequence[str], row: Sequence[str], numbers: Sequence[int]) -> str:
    return "".join(
        f'<td role="cell" data-head="{heads[i]}"{_kind(i, numbers)}>{cell}</td>' for i, cell in enumerate(row)
    )


def _kind(column: int, numbers: Sequence[int]) -> str:
    return ' class="number"' if column in numbers else ""


def facts(pairs: Mapping[str, str]) -> str:
    """Names and values, which are HTML already."""
    return "<dl>" + "".join(f"<dt>{key}</dt><dd>{value}</dd>" for key, value in pairs.items()) + "</dl>"


def more(summary: str, inner: str) -> str:
    """What opens when it is asked for."""
    return f"<details><summary>{summary}</summary>{inner}</details>"


def shortened(items: Sequence[T], listed: int = LISTED) -> Iterator[tuple[T, int]]:
    """(item, 0) of each; of more than `listed` the first and the last, and between them (item, number left out)."""
    half = listed // 2
    for index, item in enumerate(items):
        if len(items) <= listed or index < half or index >= len(items) - half:
            yield item, 0
        elif index == half:
            yield item, len(items) - listed


def count(number: int, one: str, many: str = "") -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
