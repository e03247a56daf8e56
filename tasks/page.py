"""Task of reporting: a run's page made anew, with what its records amount to, and a link to it in the UI."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from storage.audit.collect import collect
from storage.audit.keys import load_or_create_key
from storage.audit.standing import Standing, standing
from storage.ledger import Ledger
from storage.page.report import page_file, write_report
from storage.store import LocalStore, open_store
from tasks import show
from tasks.references import AUDITS, KEYS, key_name

OWN = "this machine"  # its auditor's key is the one that its owner can count without asking anybody


@task(task_run_name="report page", cache_policy=NO_CACHE)
def report_page(store: str, records: str) -> str:
    """Write the page of the run in `store` beside the records, in place of the last one; the file's path.

    It counts this machine's own auditor. Records at an address: the page lies beside the default ones.
    """
    release, kept = open_store(store), open_store(records)
    ledger = Ledger(release)
    file = page_file(kept.root if isinstance(kept, LocalStore) else AUDITS, ledger.run_id)
    named = {load_or_create_key(KEYS, "auditor").public: OWN}
    found = standing(release, ledger, collect([release, kept], ledger, named), named, datetime.now(UTC))
    write_report(file, release, ledger, found)
    _show(store, file, ledger, found)
    return str(file)


def _show(store: str, file: Path, ledger: Ledger, found: Standing) -> None:
    proven = found.proven
    facts = [f"{number} drawn: {state}" for state, number in sorted(found.states.items())]
    facts += [f"against the run: {each.date}: {each.kind}" for each in found.against[-20:]]
    headline = f"{proven.audited} of {proven.steps} steps were drawn, and match for {OWN}"
    links = (f"report page: {show.page_link(file)}", show.link(store))
    show.result(key_name("report", ledger.run_id[:16]), headline, (*links, *facts))
