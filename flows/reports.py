"""The pages of published runs on this machine, for a browser beside the UI, which may not open files by itself.

Serves what lies in a release, a folder with a RELEASE.json, and pages that were made of runs beside their records;
nothing else: whoever publishes means it to be read.
On the loopback interface, like the UI.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from storage.page.report import is_kept_page
from storage.release import RELEASE_KEY


@contextlib.contextmanager
def served(port: int) -> Iterator[str]:
    """Yields the address below which a release in the folder /a/b is at /a/b/."""
    with ThreadingHTTPServer(("127.0.0.1", port), _Releases) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}"
        finally:
            listener.shutdown()


class _Releases(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        """A path of this machine, not of the working folder; links are followed before it is judged."""
        self.directory = "/"
        return str(Path(super().translate_path(path)).resolve())

    def send_head(self) -> BytesIO | BinaryIO | None:
        """Not found where it is in no release, and no page."""
        try:
            path = Path(self.translate_path(self.path))
            published = is_kept_page(path) or any((at / RELEASE_KEY).is_file() for at in (path, *path.parents))
        except (OSError, ValueError):  # a folder that may not be read, a name too long, a zero byte
            published = False
        if not published:
            self.send_error(HTTPStatus.NOT_FOUND, "no published run")
            return None
        return super().send_head()

    def list_directory(self, path: object) -> None:
        """A release says itself what it holds."""
        self.send_error(HTTPStatus.NOT_FOUND, "no such object")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody asked."""
