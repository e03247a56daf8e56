"""The report page as a reader meets it: fast, without a mouse, on a phone, in the dark, and quiet."""

import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from storage.page.steps import DRAWN, MARKS
from tests.browser.conftest import DESKTOP, PHONE, Open

pytestmark = pytest.mark.browser

LIMIT_MS = 2000
LOADS = 5  # of which the fastest counts: what the page takes, not what others do to this machine meanwhile

WIDER = """() => [...document.body.querySelectorAll("*")].filter((e) => e.checkVisibility() && !e.closest("pre"))
  .filter((e) => !e.matches(".skip, thead, thead *") && e.getBoundingClientRect().right > innerWidth + 0.5)
  .map((e) => e.tagName + ": " + e.textContent.slice(0, 40))"""
FILL = "(sign) => getComputedStyle(document.querySelector(sign)).backgroundColor"
PIXEL = """([x, y]) => {
  const [red, green, blue] = document.getElementById("cells").getContext("2d").getImageData(x, y, 1, 1).data;
  return `rgb(${red}, ${green}, ${blue})`;
}"""
EVERYTHING = """() => {
  for (const part of document.querySelectorAll("section")) part.style.contentVisibility = "visible";
  for (const part of document.querySelectorAll("details")) part.open = true;
}"""


def bits_of(file: Path) -> list[int]:
    found = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"), re.S)
    assert found
    runs = json.loads(found[1])["runs"]
    return [value for length, value in zip(runs[::2], runs[1::2], strict=True) for _ in range(length)]


def said(page: Any) -> str:
    return str(page.text_content("#said"))


def label(bits: int) -> str:
    return MARKS[(bits & (DRAWN - 1)).bit_length() - 1].label


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def test_a_map_of_80957_steps_is_there_within_two_seconds(large: Path, opened: Open) -> None:
    assert len(bits_of(large)) == 80_957
    times = {}
    for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
        found = []
        for _ in range(LOADS):
            with opened(large, size) as page:
                found.append(round(page.drawn_after))
        times[name] = found
    print(f"\n{large.stat().st_size:,} bytes; milliseconds to the whole map: {times}")
    assert all(min(found) <= LIMIT_MS for found in times.values()), times


@pytest.mark.parametrize("which", ["small", "large", "published"])
def test_it_asks_for_nothing_and_complains_of_nothing(which: str, opened: Open, request: pytest.FixtureRequest) -> None:
    file = request.getfixturevalue(which)
    with opened(file) as found:
        assert (found.asked, found.said) == ([file.as_uri()], [])
    with served(file.parent) as address, opened(address + file.name) as found:
        assert (found.asked, found.said) == ([address + file.name], [])


def test_its_policy_stops_what_got_in(small: Path, opened: Open) -> None:
    with opened(small) as found:
        found.page.evaluate("""() => {
          const script = document.createElement("script");
          script.textContent = "window.got = 1";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.got = 2'>");
        }""")
        found.page.wait_for_timeout(200)
        assert found.page.evaluate("window.got") is None and len(found.said) >= 2
        assert all("Content Security Policy" in message for message in found.said)


def test_without_a_mouse(small: Path, opened: Open) -> None:
    bits = bits_of(small)
    drawn = [step for step, value in enumerate(bits) if value & DRAWN]
    with opened(small) as found:
        page = found.page
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        for _ in range(60):
            if page.evaluate("document.activeElement.id") == "step":
                break
            page.keyboard.press("Tab")
        page.keyboard.type("17")
        page.keyboard.press("Enter")
        assert said(page).startswith(f"Step 17: {label(bits[17])}")
        for _ in range(4):  # Go, the two buttons, the map
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "cells"
        for key, step in (("ArrowRight", 18), ("ArrowLeft", 17), ("Home", 0), ("ArrowLeft", 0), ("End", 39)):
            page.keyboard.press(key)
            assert said(page).startswith(f"Step {step}: {label(bits[step])}")
            assert page.get_attribute("#cells", "aria-valuenow") == str(step)
        page.keyboard.press("n")
        assert said(page).startswith(f"Step {drawn[0]}: ") and "drawn on" in said(page)
        page.keyboard.press("p")
        assert said(page).startswith(f"Step {drawn[-1]}: ")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.dataset.mark") == str(len(MARKS) - 1)


def test_rows_and_marks_of_a_large_map(large: Path, opened: Open) -> None:
    bits = bits_of(large)
    with opened(large) as found:
        page = found.page
        columns = int(re.findall(r"\d+", page.text_content("#row"))[0])
        page.focus("#cells")
        page.keyboard.press("ArrowDown")
        assert said(page).startswith(f"Step {columns:,}: ") and columns % 50 == 0
        page.keyboard.press("End")
        assert said(page).startswith("Step 80,956: ")
        for number in {(value & (DRAWN - 1)).bit_length() - 1 for value in set(bits)}:
            page.focus(f"[data-mark='{number}']")
            page.keyboard.press("Enter")
            step = int(page.get_attribute("#cells", "aria-valuenow"))
            assert label(bits[step]) == MARKS[number].label


def test_the_large_run_shows_every_mark(large: Path) -> None:
    assert {label(bits) for bits in set(bits_of(large))} == {mark.label for mark in MARKS}
    html = large.read_text(encoding="utf-8")
    assert 'class="result bad"' in html and "Dispute of step " in html and "witnessed by &lt;img src=x" in html


def test_pointing_at_a_cell(small: Path, opened: Open) -> None:
    with opened(small) as found:
        found.page.click("#cells", position={"x": 4 + 24 * 5 + 10, "y": 12})
        assert said(found.page).startswith("Step 5: ")


@pytest.mark.parametrize("which", ["small", "large", "published"])
def test_on_a_phone_nothing_is_cut_off(which: str, opened: Open, request: pytest.FixtureRequest) -> None:
    with opened(request.getfixturevalue(which), PHONE) as found:
        found.page.evaluate(EVERYTHING)
        assert found.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        assert found.page.evaluate(WIDER) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cells_have_the_colours_of_the_legend(small: Path, opened: Open, scheme: str) -> None:
    bits = bits_of(small)
    with opened(small, scheme=scheme) as found:
        for step in range(1, 40):
            number = (bits[step] & (DRAWN - 1)).bit_length() - 1
            fill = found.page.evaluate(FILL, f".sign.m{number}")
            corner = [4 + 24 * step + 6, 24]  # where neither sign nor frame is
            assert found.page.evaluate(PIXEL, corner) == fill, (step, MARKS[number].name)


def test_the_map_follows_the_scheme(small: Path, opened: Open) -> None:
    with opened(small) as found:
        look = "[getComputedStyle(document.body).backgroundColor, document.getElementById('cells').toDataURL()]"
        paper, cells = found.page.evaluate(look)
        found.page.emulate_media(color_scheme="dark")
        found.page.wait_for_timeout(200)
        dark_paper, dark_cells = found.page.evaluate(look)
        assert (paper, dark_paper) == ("rgb(255, 255, 255)", "rgb(20, 23, 26)") and cells != dark_cells


def test_without_its_script_the_numbers_are_there(small: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(small.as_uri())
    page.locator("#map").scroll_into_view_if_needed()  # parts that are far from the screen are not laid out
    page.wait_for_function("document.querySelector('#map').innerText")
    shown = page.inner_text("#map")
    assert "The map needs the script" in shown and "attested" in shown and "What it proves" in shown
    context.close()
