"""Which Chromium the page is looked at with: the system's.

python -m tests.browser.chromium    installs it where it is missing, if root does so on Debian or the like
"""

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome")
# What a browser would do of itself must not be taken for a request of the page.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find() -> str | None:
    """Path of the browser."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def install() -> None:
    """Make sure that there is one; SystemExit says how where this user may not."""
    if find():
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit("Chromium is missing, and this user may not install it; try: sudo apt-get install chromium")
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"], check=True)


if __name__ == "__main__":
    install()
