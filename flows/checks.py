"""Checks without a replay: certificates, a published run, this machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage import engine
from storage import recipe as recipes
from storage.audit import dispute
from storage.audit.given import check_given
from storage.audit.later import counts
from storage.audit.proofs import check_proofs
from storage.audit.release import check_release
from storage.audit.verdict import Report
from storage.errors import LedgerFault, UsageError, VerbatimError
from storage.ledger import HEADER_KEY, MAX_HEADER, Header, Ledger
from storage.memory import forecast
from storage.mirrors import bad_copies, open_copies
from storage.named import read_file
from storage.provenance import PACKAGES, provenance
from storage.store import Store, open_store

COUNTED = ("cpu", "nvidia")  # backends whose memory is counted, in model/memory.py and device_memory.py


def records(copies: list[str], paths: list[Path], again: tuple[str, Report] | None = None) -> list[dict[str, str]]:
    """Check records of audits against a published ledger, and all of them beside each other; see check_given().

    copies: addresses of the release, the preferred first; bad copies are named after what is genuine. again: backend
    and report of a replay, by which each proof of replay is made again. Raises CertificateFault or InputFault for the
    first that is wrong, Equivocation for two histories.
    """
    store = open_copies(copies)
    given = check_given(((str(path), _read(path)) for path in paths), store, Ledger(store))
    if again:
        check_proofs(store, given.bodies, *again)
    done = [{"what": where, "says": says} for where, says in given.says.items()]
    return done + [copy.document() for copy in bad_copies(store)]


def _read(path: Path) -> bytes:
    try:
        return read_file(path, dispute.MAX_DISPUTE)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            cause="a wrong name, or nothing was audited yet",
            next_step="verbatim audit ADDRESS --step N makes a certificate and says where it lies",
        ) from None


def release(copies: list[str]) -> list[dict[str, str]]:
    """Check a published run, of which there may be several copies; see check_release(). No cache is used."""
    store = open_copies(copies, cached=False)
    body, later = check_release(store)
    kinds = counts(later).items()
    return [
        {"what": store.uri, "says": f"run {body.run}, {body.steps} steps, {len(body.objects)} objects"},
        {"what": "trajectory root", "says": body.trajectory_root},
        *({"what": f"later {kind}", "says": f"{number}, none listed, each proven"} for kind, number in kinds),
        *(copy.document() for copy in bad_copies(store)),
    ]


def memory(recipe: str, run: str, backend: str) -> list[dict[str, Any]]:
    """What each piece of a recipe's work, or of a run's, takes of memory, and by which plan this machine does it.

    A recipe says how many processes train; of a run alone that is not known, and is taken to be one.
    """
    if backend not in COUNTED:
        raise UsageError(
            f"memory is counted for the backends {' and '.join(COUNTED)}, not for {backend}",
            next_step="leave --backend out",
        )
    if (recipe == "") == (run == ""):
        raise UsageError("give either --recipe NAME or --run ADDRESS", next_step="verbatim doctor --help")
    asked = recipes.load(recipe) if recipe else None
    spec = asked.run if asked else _header(open_store(run)).run_spec()
    device = None if backend == COUNTED[0] else engine.load_backend(backend).device_memory()
    return [found.document() for found in forecast(spec, device, asked.plan.processes if asked else 1)]


def _header(store: Store) -> Header:
    """What the run is; its entries, of which a server gives one at a time, are not read."""
    return Header.parse(store.read(HEADER_KEY, limit=MAX_HEADER), HEADER_KEY, LedgerFault)


def machine(backend: str, report: Callable[[str], None]) -> dict[str, Any]:
    """What runs here, checked: MachineFault if a conformance vector fails, VerbatimError for a wrong package.

    report: how far the self-test is.
    """
    folders = {name: str(Path(str(importlib.import_module(name).__file__)).parent.parent) for name in PACKAGES}
    if len(set(folders.values())) != 1:
        found = ", ".join(f"{name} from {folder}" for name, folder in folders.items())
        raise VerbatimError(
            f"the five packages do not come from one folder: {found}",
            cause="another package with one of these names is installed",
            next_step="make a new environment: rm -r .venv, then make install",
        )
    engine.self_test(backend, report)
    checked: dict[str, Any] = {"packages": folders["kernels"], "self-test": "every conformance vector equal"}
    return checked | provenance(backend).document()
