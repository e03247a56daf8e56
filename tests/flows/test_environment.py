"""The environment changes speed and silence only, and Numba's cache follows the kernels' sources."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path

from flows import environment


def test_importing_flows_sets_the_environment() -> None:
    for name in environment.variables():
        assert os.environ[name], name
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert os.environ["DO_NOT_TRACK"] == "1"


def test_the_cache_folder_changes_with_any_source_of_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    first = environment.kernels_digest(tmp_path)
    assert environment.kernels_digest(tmp_path) == first
    (tmp_path / "b.py").write_text("y = 2\n")
    changed = environment.kernels_digest(tmp_path)
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert len({first, changed, environment.kernels_digest(tmp_path)}) == 3


def test_the_server_offers_no_ui_that_asks_another_host(api: str) -> None:
    with urllib.request.urlopen(f"{api.removesuffix('/api')}/ui-settings", timeout=10) as answer:
        assert json.load(answer)["available_uis"] == ["v1"]


def test_a_limit_is_set_where_the_processor_has_tiles(tmp_path: Path) -> None:
    for name, flags in (("with", "sse2 amx_bf16 amx_int8 avx512_vnni"), ("without", "sse2 avx512_vnni")):
        (tmp_path / name).write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert environment.has_tiles(tmp_path / "with")
    assert not environment.has_tiles(tmp_path / "without")
    assert not environment.has_tiles(tmp_path / "missing")
