"""Each deployment is started from its form in a browser, watched to its end, and its artifacts are looked for.

Screenshots lie in the folder that VERBATIM_SCREENSHOTS names, else in the test's own: look at them.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, TimeoutError

from tests.ui.served import Served, until

pytestmark = pytest.mark.ui
FORM = "xpath=//label[normalize-space()='{} (Optional)']/following::*[self::textarea or self::input][1]"
CHOICE = "xpath=//label[normalize-space()='{} (Optional)']/following::button[contains(@class, 'select')][1]"


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("VERBATIM_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "small"


def fill(page: Page, served: Served, deployment: str, **fields: str) -> None:
    """Open the form of a deployment by what a person clicks, and fill in these fields."""
    page.goto(f"{served.url}/deployments", wait_until="domcontentloaded")
    page.get_by_role("link", name=deployment, exact=True).first.click()  # the second leads to its flow
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Quick run").or_(page.get_by_text("Custom run")).first.wait_for()
    page.get_by_text("Custom run").click()
    for name, value in fields.items():
        page.locator(FORM.format(name)).fill(value)


def start(page: Page, served: Served, deployment: str, **fields: str) -> str:
    """Start a run from the form; its id."""
    known = made(served)
    fill(page, served, deployment, **fields)
    submit(page)
    (run,) = until("the form makes a run", lambda: made(served) - known)
    page.goto("about:blank")  # a page of the UI draws without end, which takes half a core from the run
    return run


def submit(page: Page) -> None:
    """Click until the form is left: now and then a click is lost on it."""
    for _ in range(3):
        page.get_by_role("button", name="Submit").click()
        with contextlib.suppress(TimeoutError):
            page.wait_for_url(re.compile(r"/deployments/deployment/[^/]+$"), timeout=30_000)
            return
    raise AssertionError(page.inner_text("main"))


def made(served: Served) -> set[str]:
    """The runs that were made by a form."""
    asked = {"flow_runs": {"parent_task_run_id": {"is_null_": True}}}
    runs = served.call("POST", "/flow_runs/filter", asked)
    return {str(run["id"]) for run in runs if "auto-scheduled" not in run["tags"]}


def look(page: Page, served: Served, run: str, picture: Path) -> str:
    """The run's page and its artifacts in pictures; returns the text that is seen there."""
    page.goto(f"{served.url}/runs/flow-run/{run}", wait_until="domcontentloaded")
    page.locator("#logs").wait_for()
    page.wait_for_timeout(1500)
    page.screenshot(path=picture.with_suffix(".logs.png"))
    page.locator("#artifacts").click()
    page.wait_for_timeout(1500)
    page.screenshot(path=picture.with_suffix(".artifacts.png"), full_page=True)
    return page.inner_text("body")


def descriptions(artifacts: list[dict[str, Any]], kind: str) -> str:
    return "\n".join(artifact["description"] or "" for artifact in artifacts if artifact["type"] == kind)


def test_the_list_shows_every_deployment_and_asks_no_other_host(page: Page, served: Served, shots: Path) -> None:
    asked = set[str]()
    page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    page.goto(f"{served.url}/deployments", wait_until="domcontentloaded")
    for name in (
        "audit-step",
        "evaluate",
        "nightly-sample",
        "pipeline",
        "prepare",
        "publish",
        "reproduce-mix",
        "train",
    ):
        page.get_by_role("link", name=name, exact=True).first.wait_for()
    page.screenshot(path=shots / "deployments.png")
    assert asked - {""} == {urlsplit(served.url).netloc}


def test_a_form_explains_its_fields_and_takes_no_secret(page: Page, served: Served, shots: Path) -> None:
    fill(page, served, "nightly-sample", beacon="https://somebody:pass-word@api.drand.sh")
    assert "the draw then waits a quarter of an hour" in page.inner_text("body")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_timeout(5000)
    page.screenshot(path=shots / "secret.png", full_page=True)
    runs = served.call("POST", "/flow_runs/filter", {})
    assert not [run for run in runs if "pass-word" in str(run)]


# In this order: each needs what those before it made.
@pytest.mark.parametrize(
    ("deployment", "fields", "name", "tags", "result"),
    [
        ("prepare", {"recipe": "{recipe}", "folder": "{folder}"}, "prepare small", {"run:small"}, "windows"),
        (
            "train",
            {"recipe": "{recipe}", "folder": "{folder}"},
            "train small",
            {"run:small"},
            "12 steps, held-out loss",
        ),
        ("publish", {"folder": "{folder}"}, "publish small", {"run:small"}, "12 steps published and read back"),
        (
            "audit-step",
            {"published": "{folder}/published", "step": "7", "records": "{folder}/audits"},
            "audit step 7 of small",
            {"run:small", "step:7"},
            "MATCH step 7",
        ),
        (
            "nightly-sample",
            {"published": "{folder}/published", "beacon": "own", "records": "{folder}/audits"},
            "nightly sample of small",
            {"run:small", "nightly"},
            "Draw of",
        ),
        (
            "evaluate",
            {"published": "{folder}/published", "records": "{folder}/audits"},
            "evaluate small",
            {"run:small"},
            "MATCH held-out 12",
        ),
        ("reproduce-mix", {"recipe": "{recipe}", "folder": "{folder}"}, "reproduce the mix of small", set(), "MATCH"),
        (
            "pipeline",
            {"recipe": "{recipe}", "folder": "{folder}-again", "audits": "1"},
            "pipeline small-again",
            {"run:small-again"},
            "12 steps trained and published; audited: initial MATCH, step",
        ),
    ],
)
def test_a_run_from_its_form(
    page: Page,
    served: Served,
    recipe: Path,
    folder: Path,
    shots: Path,
    deployment: str,
    fields: dict[str, str],
    name: str,
    tags: set[str],
    result: str,
) -> None:
    given = {field: value.format(recipe=recipe, folder=folder) for field, value in fields.items()}
    run = start(page, served, deployment, **given)
    assert served.finished(run) == "COMPLETED", (served.home / "worker.log").read_text()[-3000:]
    found = served.call("GET", f"/flow_runs/{run}")
    assert found["name"] == name and tags <= set(found["tags"])
    artifacts = served.artifacts(run)
    markdown = [artifact["data"] for artifact in artifacts if artifact["type"] == "markdown"]
    assert any(text.startswith("**") and result in text.split("\n")[0] for text in markdown), markdown
    if deployment != "reproduce-mix":
        assert descriptions(artifacts, "progress"), "no progress"
    look(page, served, run, shots / deployment)


def test_a_link_leads_to_the_report(page: Page, served: Served, folder: Path, shots: Path) -> None:
    runs = served.call("POST", "/artifacts/filter", {"artifacts": {"key": {"any_": ["release"]}}})
    address = re.search(r"\[report\]\((\S+)\)", runs[0]["data"])
    assert address
    page.goto(address[1])
    assert page.inner_text("h1") == "tiny" and "12 steps" in page.inner_text("header")
    page.screenshot(path=shots / "report.png")
    key = page.goto(address[1].replace("published/index.html", "run/ledger/header.json"))
    assert key and key.status == 404
