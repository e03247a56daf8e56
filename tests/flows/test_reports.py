"""The pages of published runs beside the UI: what lies in a release is served, and nothing else of this machine."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import quote

from flows import reports
from storage.release import RELEASE_KEY


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_release_is_served_and_nothing_beside_it(tmp_path: Path) -> None:
    release, secret = tmp_path / "a run" / "published", tmp_path / "secret"
    (release / "ledger").mkdir(parents=True)
    for path in (secret, release / RELEASE_KEY, release / "index.html", release / "ledger" / "header.json"):
        path.write_text("{}", encoding="utf-8")
    (release / "link").symlink_to(secret)
    with reports.served(0) as pages:
        base = pages + quote(str(release))
        for path in ("/index.html", f"/{RELEASE_KEY}", "/ledger/header.json", "/"):
            assert status(base + path) == 200, path
        for path in ("/ledger/", "/none", "/../../secret", "/%2e%2e/%2e%2e/secret", "/link", "/%00", "/" + "x" * 300):
            assert status(base + path) == 404, path
        assert status(pages + str(secret)) == status(pages + "/") == 404
