"""`verbatim coverage` and `next`: what the records of a run's audits amount to, and what a key should audit next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.audit.collect import Evidence, collect
from storage.audit.coverage import EXAMPLES, first_for
from storage.audit.keys import Key, load_or_create_key
from storage.audit.named import Named, load_named
from storage.audit.standing import Standing, standing
from storage.audit.states import STATES, DrawnStep, parts
from storage.errors import Divergence, InputFault
from storage.ledger import Entry, Ledger
from storage.olmes import Body
from storage.page.report import write_report
from storage.store import Store, open_store

SHOWN = 40  # rows that a person is shown


def _collected(store: str, records: list[str], named: Path | None, *own: str) -> tuple[Store, Ledger, Evidence, Named]:
    """own: keys whose certificates are wanted too, though they are not named."""
    release, names = open_store(store), load_named(named) if named else {}
    ledger = Ledger(release)
    evidence = collect([release, *map(open_store, records)], ledger, {*names, *own})
    return release, ledger, evidence, names


def report(store: str, records: list[str], named: Path | None, page: Path | None = None) -> dict[str, Any]:
    """States of all drawn steps, what counts against the run, coverage by step, what is proven: plain values.

    page: where to write the same, with the run's curves and map, as a page for a browser.
    """
    release, ledger, evidence, names = _collected(store, records, named)
    found, steps = standing(release, ledger, evidence, names, datetime.now(UTC)), len(ledger)
    chances = {str(bad): found.proven.detection(bad) for bad in EXAMPLES if bad <= steps}
    if page is not None:
        write_report(page, release, ledger, found)
    return {
        "run": ledger.run_id,
        "steps": steps,
        "drawn": [asdict(row) for row in found.rows],
        "waiting": found.waiting,
        "states": dict(found.states),
        "findings": [asdict(finding) for finding in found.findings],
        "disputes": [
            {"step": body.step, "by": names.get(body.auditor, body.auditor), "where": where}
            for where, body in sorted(evidence.disputes.items())
        ],
        "scores": [_score(body, names) for body in sorted(evidence.evaluations, key=lambda body: body.step)],
        "copied": found.copied,
        "faulty": evidence.faulty,
        "found_in": evidence.found_in,
        "named": sorted(set(names.values())),
        "certificates": len(evidence.certificates),
        "beyond": evidence.beyond,
        "unlisted": sum(body.auditor not in names for body in evidence.certificates),
        "levels": found.levels,
        "proven": asdict(found.proven) | {"smallest": found.proven.smallest} | {"chances": chances},
        "page": None if page is None else str(page),
        "exit_code": _exit_code(found),
    }


def _score(body: Body, names: Named) -> dict[str, Any]:
    tasks = {task: float(score.share()) for task, score in sorted(body.scores.items())}
    by = names.get(body.evaluator, f"unlisted key {body.evaluator[:16]}")
    said = {"mean": float(body.mean()), "averaged": body.averaged(), "tasks": tasks}
    return {"step": body.step, "state": body.state, "evaluator": body.evaluator, "by": by} | said


def _exit_code(found: Standing) -> int:
    if found.against:
        return InputFault.exit_code
    return Divergence.exit_code if "disputed" in found.levels else 0


def report_lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for a person."""
    yield f"run {found['run']}: {found['steps']} steps, {len(found['drawn'])} draws of a step"
    for finding in found["findings"]:
        yield f"against the run: {finding['date'] or 'at any date'}: {finding['kind']}: {finding['says']}"
    for date in found["waiting"]:
        yield f"stated: {date}: its round is still to come"
    yield from _table(found["drawn"])
    for state, number in found["states"].items():
        yield f"{number} {state}: {STATES[state]}"
    yield from (f"{number} records in {uri}" for uri, number in found["found_in"].items())
    whose = f"{found['certificates']} certificates, {found['unlisted']} of them by keys without a name"
    yield whose if found["named"] else f"{whose}: --named gives the file of keys that you count"
    for each in found["disputes"]:
        yield f"dispute: step {each['step']}, by {each['by']}: {each['where']}; verbatim dispute judges it"
    for each in found["scores"][:SHOWN]:
        tasks = ", ".join(f"{task} {share:.1%}" for task, share in each["tasks"].items())
        yield f"scores of state {each['step']}, by {each['by']}: {each['mean']:.1%}, {each['averaged']}: {tasks}"
    if (more := len(found["scores"]) - SHOWN) > 0:
        yield f"and {more} more scores: --json lists them all"
    if found["beyond"]:
        yield f"not counted: {found['beyond']} more records, faulty or by keys without a name: too many to look at"
    yield from (f"copied: {said}" for said in found["copied"])
    yield from (f"not counted: {where}: {why}" for where, why in found["faulty"].items())
    levels = Counter(found["levels"])
    reached = f"{levels['confirmed']} confirmed, {levels['attested']} attested, {levels['disputed']} disputed"
    yield f"all steps, drawn or not: {reached}, of {found['steps']}"
    yield from _proven(found["proven"])
    if found["page"]:
        yield f"page: {found['page']}"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        yield f"{'date':10}  {'step':>6}  {'state':10}  {'by':24}  drawn on"
    for row in rows[-SHOWN:]:
        against = [f"{name} (no match)" for name in row["against"]]
        by = ", ".join([*row["names"], *row["parts"], *against, *_unlisted(row)]) or "nobody"
        yield f"{row['date']:10}  {row['step']:6}  {row['state']:10}  {by:24}  {row['basis']}"
    if (more := len(rows) - SHOWN) > 0:
        yield f"and {more} earlier ones: --json lists them all"


def _unlisted(row: dict[str, Any]) -> list[str]:
    return [f"{row['unlisted']} unlisted"] if row["unlisted"] else []


def _proven(found: dict[str, Any]) -> Iterator[str]:
    if found["smallest"] is None:
        yield "no drawn step was audited by a named key: nothing is proven of the others"
        return
    chances = ", ".join(f"{bad} with {chance:.1%}" for bad, chance in found["chances"].items())
    yield f"{found['audited']} of {found['steps']} steps were drawn and audited; so many bad ones would show: {chances}"
    if (later := found["steps"] - max(n for n, _ in found["heads"])) > 0:
        yield f"the last {later} steps came after every draw of these: of them alone nothing is proven"
    if found["unaudited"]:
        yield f"{found['unaudited']} more were drawn and not audited by a named key: bad ones may be among them"
    if found["on_word"]:
        yield f"{found['on_word']} of them were drawn on the trainer's word: no key that you count saw the statement"
    yield f"the smallest number of bad steps that would have been found with 95 %: {found['smallest']}"


def next_for(store: str, records: list[str], named: Path | None, keys: Path) -> dict[str, Any]:
    """What this machine's auditor should take: {key, of, step, date, state, unit}; step None: nothing is left.

    of: how many drawn steps are open to the key. unit: of a step that was opened, one that neither this key nor a named
    one audited, else None: a stranger's certificate keeps nobody from looking.
    """
    auditor = load_or_create_key(keys, "auditor")
    key = auditor.public
    release, ledger, evidence, names = _collected(store, records, named, key)
    bodies = evidence.certificates
    own = {body.step for body in bodies if body.auditor == key and isinstance(body.reproduced, Entry)}
    found = standing(release, ledger, evidence, names, datetime.now(UTC))
    open_to = [row for row in found.rows if row.state != "confirmed" and row.step not in own]
    row = _choose(open_to, auditor, ledger.run_id)
    if row is None:
        return {"key": key, "of": 0, "step": None, "drawn": len(found.rows)}
    done = parts([body for body in bodies if body.auditor == key or body.auditor in names]).get(row.step, set())
    unit = _unit(ledger, row.step, auditor, done) if row.step in found.opened else None
    return {"key": key, "of": len(open_to), "step": row.step, "date": row.date, "state": row.state, "unit": unit}


def _unit(ledger: Ledger, step: int, key: Key, done: set[str]) -> int | None:
    """The unit of an opened step that this key should take; None where all were taken."""
    units = -(-ledger[step].windows // ledger.header.run_spec().numerics.unit_windows)
    left = [unit for unit in range(units) if f"unit {unit}" not in done]
    return first_for(key, f"{ledger.run_id} step {step}", left) if left else None


def _choose(rows: list[DrawnStep], key: Key, run: str) -> DrawnStep | None:
    """Steps that nobody answered come before those that keys without a name did, and these before attested ones."""
    if not rows:
        return None
    worth = {row.step: (row.state in ("attested", "disputed"), row.unlisted > 0) for row in rows}
    wanted = [step for step, value in worth.items() if value == min(worth.values())]
    step = first_for(key, run, wanted)
    return next(row for row in rows if row.step == step)


def next_lines(found: dict[str, Any], store: str, records: str) -> Iterator[str]:
    """The same for a person."""
    if found["step"] is None:
        if found["drawn"]:
            yield "every drawn step is confirmed, or was audited by this key: nothing is left to take"
        else:
            yield "no draw of this run is known in the release or the records; --records names where others lie"
            yield f"any step can be audited without one: verbatim audit {shlex.quote(store)} --step N"
        return
    yield f"step {found['step']}, drawn on {found['date']}, {found['state']}: one of {found['of']} open to this key"
    command = f"verbatim audit {shlex.quote(store)} --draw {found['date']} --step {found['step']}"
    yield f"next: {command}{records}"
    if found["unit"] is not None:
        yield f"or one unit of it, in a fraction of the time: {command} --unit {found['unit']}{records}"
