"""The report page: one HTML file, whole in itself, the same bytes from the same run, records and time.

    index.html of a release      published with the run; it counts no audits, not even those that are published with it
    verbatim coverage --page     the same page by whoever makes it, with the draws and certificates that he collected

It loads nothing: a policy in its head forbids every address, and every script and style but the two in it, by digest.
Whatever comes from a record is escaped (markup.py); what the script shows, it shows as text.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from storage.audit.standing import Standing
from storage.olmes import Body
from storage.page import audited, shelf, told
from storage.page.history import History
from storage.page.markup import Place, name, text
from storage.page.steps import DRAWN, map_section, notes, runs, step_bits
from storage.page.worth import worth

PAGE_KEY = "index.html"
HERE = Path(__file__).parent
TITLES = {
    "against": "Against it",
    "map": "Every step",
    "proven": "What was proven",
    "draws": "Draws",
    "certificates": "Certificates",
    "worth": "What it is worth",
    "curves": "Curves",
    "events": "Events",
    "chain": "Chain",
    "check": "Check it",
    "use": "Use it",
    "checkpoints": "Checkpoints",
    "recipe": "Recipe",
    "here": "What is here",
}


def page(history: History, place: Place, standing: Standing | None = None, scores: Sequence[Body] = ()) -> bytes:
    """The page. standing: what the records of audits amount to, None where the maker knows none; scores: on tasks."""
    bits, steps = step_bits(history, standing), len(history.ledger)
    seen = list(audited.seen_heads(standing)) if standing else []
    made = f"on {standing.now:%Y-%m-%d at %H:%M} UTC" if standing else "when the run was published"
    parts = [
        audited.against(standing) if standing else "",
        map_section(bits, standing is not None),
        *(_audits(standing, steps) if standing else ()),
        worth(history, place, scores, standing.named if standing else {}),
        told.curves(history),
        told.events(history),
        told.chain(history, place, seen, made),
        shelf.check(steps, place.code),
        shelf.use(place),
        told.checkpoints(history, place),
        told.recipe(history, place),
        shelf.classes(place),
    ]
    body = "\n".join(part for part in parts if part)
    kind, said = audited.result(standing, steps) if standing else ("open", _published())
    style, script = _file("page.css").strip(), _file("page.js").strip()
    return (
        Template(_file("page.html"))
        .substitute(
            style=style,
            script=script,
            style_digest=_digest(style),
            script_digest=_digest(script),
            title=text(history.spec.name),
            run=history.ledger.run_id[:16],
            name=name(history.spec.name),
            kind=kind,
            result=said,
            summary=_summary(history),
            maker=_maker(standing, made),
            links=_links(body),
            body=body,
            data=_data({"runs": runs(bits), "drawn": DRAWN, "notes": notes(history, standing)}),
        )
        .encode()
    )


def _audits(standing: Standing, steps: int) -> tuple[str, ...]:
    return audited.proven(standing, steps), audited.draws(standing), audited.certificates(standing)


def _links(body: str) -> str:
    there = [anchor for anchor in TITLES if f'<section id="{anchor}"' in body]
    return " ".join(f'<a href="#{anchor}">{TITLES[anchor]}</a>' for anchor in there)


def _published() -> str:
    return (
        "This page came with the run and counts no audits, not even those whose records came with it, so it proves "
        "nothing: <code>verbatim coverage</code> makes it with them, for the keys that you count. Whoever doubts a "
        "step can replay it, from what lies here alone."
    )


def _summary(history: History) -> str:
    m, steps = history.spec.model, len(history.ledger)
    tokens = history.ledger[steps - 1].tokens if steps else 0
    return (
        f"A language model of {m.parameter_count():,} parameters ({m.layers} layers of width {m.d_model}, "
        f"vocabulary {m.vocab:,}), trained for {steps:,} of {history.steps:,} steps on {tokens:,} tokens. From the "
        "state before a step and its windows follows the state after it, bit for bit, on any machine."
    )


def _maker(standing: Standing | None, made: str) -> str:
    yourself = '<a href="#check">make it yourself</a>.'
    if standing is None:
        return f"Made by the trainer's program when the run was published, and signed by nobody: {yourself}"
    names = ", ".join(name(who) for who in sorted(set(standing.named.values()))[:20]) or "nobody"
    return f"Made by <code>verbatim coverage</code> {made}, signed by nobody: {yourself} It counts the keys of {names}."


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _digest(inner: str) -> str:
    """What the policy calls an element with this content."""
    return "sha256-" + base64.b64encode(hashlib.sha256(f"\n{inner}\n".encode()).digest()).decode()


def _data(value: dict[str, Any]) -> str:
    """JSON that no string in it can end: in an element of HTML, `<` would."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
