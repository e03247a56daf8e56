"""index.html: whole in one file, every link leads to an object beside it, nothing of a record is taken for markup."""

import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from flows.cli import app
from storage.classes import CLASSES, class_of
from storage.curve import SPANS, loss_curve
from storage.page import LISTED, MEANING, PAGE_KEY, page
from storage.release import RELEASE_KEY
from storage.store import LocalStore
from tests.storage.conftest import Small

VOID = {"meta", "line", "circle", "polyline"}


class Read(HTMLParser):
    """Links, tags, attributes and text; what opens must close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attributes}
        self.links += [value or "" for name, value in attributes if name == "href"]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(made: Small) -> Read:
    return Read(made.published.read(PAGE_KEY).decode())


def test_every_object_of_the_release_is_linked_and_nothing_else(made: Small) -> None:
    assert set(read(made).links) == set(made.published.list())


def test_it_stands_alone(made: Small) -> None:
    found, html = read(made), made.published.read(PAGE_KEY).decode()
    assert not set(found.tags) & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not [name for name in found.names if name.startswith("on")] and "src" not in found.names
    assert not re.search(r"https?:|@import|url\(", html)
    assert html.count("<h1>") == 1 and 'lang="en"' in html and "width=device-width" in html
    assert "default-src 'none'" in html


def test_it_says_what_the_run_is(made: Small) -> None:
    found, ledger = read(made), made.run().ledger
    for name in (ledger.run_id, ledger.head, ledger.trajectory_root(), ledger.header.mix_root, ledger.header.trainer):
        assert name in found.text
    assert "trained for 12 of 12 steps" in found.text and "as declared when the run began" in found.text
    assert set(MEANING) == set(CLASSES)


def test_the_commands_that_it_tells_are_those_of_the_command_line(made: Small) -> None:
    text = re.search(r"<pre>(.*?)</pre>", made.published.read(PAGE_KEY).decode(), re.S)
    assert text
    lines = [shlex.split(line, comments=True) for line in text[1].replace("&#x27;", "'").splitlines()]
    ours = [line[1:] for line in lines if line[0] == ".venv/bin/verbatim"]
    assert ours == [["verify", "ADDRESS"], ["audit", "ADDRESS", "--initial"], ["audit", "ADDRESS", "--step", "11"]]
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {line[0] for line in ours} <= commands
    archive = next(line[2] for line in lines if line[0] == "tar")
    assert class_of(archive) == "code" and archive in made.published.list()


def test_the_same_bytes_wherever_it_is_published(made: Small) -> None:
    from storage.publish import publish

    other = LocalStore(made.folder / "elsewhere")
    publish(made.store, made.mix, other, made.key)
    assert other.read(PAGE_KEY) == made.published.read(PAGE_KEY)


def test_nothing_of_a_record_is_taken_for_markup(made: Small) -> None:
    run = made.run()
    hostile = run.spec.model_construct(**(dict(run.spec) | {"name": "<script>alert(1)</script>\"'&"}))
    html = page(replace(run, spec=hostile), {"segments/<b>\"'.json": 1, "recipe.yaml": 2}, "0" * 64).decode()
    found = Read(html)
    assert "script" not in found.tags and "<script>alert(1)</script>\"'&: a training run" in found.text
    assert "b" not in found.tags


def test_of_many_objects_the_first_and_the_last_are_linked(made: Small) -> None:
    sizes = {f"digests/{step:08d}.json": 10 for step in range(80_957)}
    html = page(made.run(), sizes, "0" * 64).decode()
    links = [link for link in Read(html).links if link.startswith("digests/")]
    assert len(links) == LISTED and links[0] == "digests/00000000.json" and links[-1] == "digests/00080956.json"
    assert f"{80_957 - LISTED:,} more, listed in {RELEASE_KEY}" in html and ">80,957<" in html and ">809,570<" in html
    assert len(html) < 40_000


def points(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    lines = [line.attrib["points"].split() for line in root.iter("polyline")]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line)] for line in lines]


def test_a_curve_goes_down_where_the_loss_does() -> None:
    (line,) = points(loss_curve([5.0, 4.0, 3.0, 2.5], {0: 5.0, 4: 2.4}))
    assert [x for x, _ in line] == sorted(x for x, _ in line) and [y for _, y in line] == sorted(y for _, y in line)
    assert len(line) == 4


def test_a_step_without_a_loss_is_a_gap() -> None:
    assert [len(line) for line in points(loss_curve([5.0, 4.0, None, None, 3.0], {}))] == [2, 1]
    assert loss_curve([None], {0: None}) == "" == loss_curve([], {})


@pytest.mark.parametrize("steps", [1, SPANS - 1, SPANS, SPANS + 1, 80_957])
def test_a_long_curve_is_drawn_by_means(steps: int) -> None:
    svg = loss_curve([3.0 + 1 / (step + 1) for step in range(steps)], {})
    (line,) = points(svg)
    assert 1 <= len(line) <= SPANS and len(svg) < 20_000
    assert all(0 <= x <= 720 and 0 <= y <= 300 for x, y in line)
