"""One browser, two made-up runs and a published one, for all tests; each test gets pages of its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from storage.page.make import PAGE_KEY
from tests.browser import chromium, made_up
from tests.storage.conftest import Small, _original  # noqa: F401

DESKTOP, PHONE = (1280, 900), (360, 740)


@dataclass
class Opened:
    """A page in the browser, and what it asked for or complained of."""

    page: Any
    asked: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def drawn_after(self) -> float:
        """Milliseconds from the start of the navigation to the whole map."""
        return float(self.page.evaluate("performance.getEntriesByName('map')[0].startTime"))


Open = Callable[..., Any]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run like the demo."""
    return made_up.report(made_up.made_up(tmp_path_factory.mktemp("small-run"), made_up.SMALL))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run of 80,957 steps."""
    return made_up.report(made_up.made_up(tmp_path_factory.mktemp("large-run"), made_up.OPEN_1B))


@pytest.fixture
def published(_original: Small, tmp_path: Path) -> Path:  # noqa: F811
    """index.html of a release, with all that lies beside it."""
    shutil.copytree(_original.folder / "published", tmp_path / "published")
    return tmp_path / "published" / PAGE_KEY


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # `make page` alone installs it

    path = chromium.find()
    assert path, "there is no Chromium: make page"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(chromium.ARGUMENTS))
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Open:
    """opened(address or file, size, scheme): a context manager of an Opened whose map is drawn."""

    @contextmanager
    def open_it(what: Path | str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Iterator[Opened]:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        found = Opened(context.new_page())
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.on("console", lambda message: found.said.append(message.text))
        found.page.on("pageerror", lambda error: found.said.append(str(error)))
        found.page.on("dialog", lambda dialog: (found.said.append(dialog.message), dialog.dismiss()))
        found.page.goto(what if isinstance(what, str) else what.as_uri())
        found.page.wait_for_function("performance.getEntriesByName('map').length")
        yield found
        context.close()

    return open_it
