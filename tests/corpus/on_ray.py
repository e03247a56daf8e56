"""A mix by a Ray cluster of this machine, through Prefect's task runner: `python -m tests.corpus.on_ray`.

Ray is installed into an environment of its own (two minutes, once). The demo's recipe with `plan.ray` is prepared there
by `verbatim prepare`, and must have the root that it has everywhere; a source that differs from its pin must end with
the error, and the exit code, that it has without a cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from storage.provenance import PROJECT
from storage.recipe import RECIPES

FOLDER = PROJECT / "runs" / "ray"
VENV = FOLDER / "venv"
INPUT_FAULT = 11


def environment() -> Path:
    """Its folder of programs; made at first, and anew where the constraints changed."""
    done, constraints = FOLDER / "constraints.txt", PROJECT / "constraints.txt"
    if not done.is_file() or done.read_bytes() != constraints.read_bytes():
        print("  an environment with Ray: about two minutes, once", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [VENV / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", constraints, "-e", f"{PROJECT}[ray]"], check=True)
        shutil.copyfile(constraints, done)
    return VENV / "bin"


def prepare(programs: Path, name: str, recipe: str) -> subprocess.CompletedProcess[str]:
    """`verbatim prepare` of a recipe's text, in an empty folder."""
    path, target = FOLDER / f"{name}.yaml", FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    path.write_text(recipe)
    command = [programs / "verbatim", "prepare", path, "--folder", target]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return subprocess.run(command, cwd=PROJECT, env=os.environ | quiet, capture_output=True, text=True, check=False)


def main() -> None:
    """Exit with 1 where something is otherwise."""
    programs = environment()
    recipe = (RECIPES / "demo.yaml").read_text().replace("plan:\n", "plan:\n  ray: local\n")
    expected = json.loads((RECIPES / "demo.expected.json").read_text())["mix_root"]
    made = prepare(programs, "demo", recipe)
    assert made.returncode == 0 and expected in made.stdout, made.stdout + made.stderr
    print(f"demo on Ray: mix root {expected}, the same", flush=True)
    changed = FOLDER / "changed.jsonl"
    changed.write_text('{"text": "another file than was pinned"}\n')
    pinned = f"path: {changed}, size: 1, sha256: '{'0' * 64}'"
    own = f"- {{kind: local, {pinned}, licence: MIT, extract: {{kind: rows}}}}\n        "
    refused = prepare(programs, "changed", recipe.replace("- kind: pypi", f"{own}- kind: pypi", 1))
    assert refused.returncode == INPUT_FAULT and "differs from its pin" in refused.stderr, (
        refused.stdout + refused.stderr
    )
    print("a changed file on Ray: the error it is elsewhere", flush=True)


if __name__ == "__main__":
    main()
