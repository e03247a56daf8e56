"""The page's account of audits: the result in a sentence, draws, certificates, and what so many audits prove."""

from collections import Counter
from collections.abc import Iterator

from storage.audit.certificate import Body
from storage.audit.coverage import EXAMPLES
from storage.audit.draw import Draw
from storage.audit.standing import Standing
from storage.audit.states import STATES, DrawnStep, by_statement
from storage.audit.witness import in_time
from storage.page.markup import begun, code, count, facts, moment, more, name, section, shortened, table, text

ROWS = 40  # of a table that are shown at once; the earlier ones open
KEPT = 2000  # rows of a table at most


def result(standing: Standing, steps: int) -> tuple[str, str]:
    """(kind, sentences): "bad", "open" or "good", for a reader who reads no more than this."""
    disputed = [f"{step:,}" for step, level in enumerate(standing.levels) if level == "disputed"]
    bad = []
    if number := len(standing.against):
        bad.append(f"{count(number, 'fact counts', 'facts count')} against this run: see below.")
    if disputed:
        where = ", ".join(disputed[:5]) + (", …" if len(disputed) > 5 else "")
        bad.append(f"A key that this page counts found <strong>no match</strong> at step {where}.")
    if bad:
        return "bad", " ".join(bad)
    unanswered, found = standing.states["unanswered"], standing.proven
    late = f" {count(unanswered, 'drawn step')} went unanswered." if unanswered else ""
    if found.smallest is None:
        why = "no drawn step was audited by a key that it counts" if standing.named else "it counts nobody's keys"
        return "open", f"Nothing contradicts this run, and to this page nothing is proven of it: {why}.{late}"
    doubtful = late or found.on_word == found.audited
    return "open" if doubtful else "good", _good(standing, steps) + late


def _good(standing: Standing, steps: int) -> str:
    found = standing.proven
    drawn = count(found.on_word, "of them was", "of them were")
    word = f" {drawn} drawn on the trainer's word alone." if found.on_word else ""
    return (
        f"Nothing contradicts this run. {count(found.audited, 'drawn step')} of {steps:,} came out equal, bit for bit, "
        f"for keys that this page counts: had {count(found.smallest or 0, 'step')} or more been false, an audit would "
        f"have met one with 95&nbsp;%.{word}"
    )


def against(standing: Standing) -> str:
    """What counts against the run, nights that were missed, disputes, records that count for nothing."""
    rows = [(moment(f.date or "at any date"), text(f.kind), text(f.says)) for f, _ in shortened(standing.findings)]
    parts = [table(("Night", "What", "Found"), rows)] if rows else []
    evidence = standing.evidence
    told = [f"Copied: {text(said)}." for said in standing.copied]
    if evidence.beyond:
        told.append(f"{count(evidence.beyond, 'record')} more, faulty or by keys without a name: too many to look at.")
    disputes = [
        f"Dispute of step {body.step:,}, by {_whose(standing, body.auditor)}, which anyone can judge by "
        f"<code>verbatim dispute</code>: {text(where)}."
        for where, body in sorted(evidence.disputes.items())
        if body.step is not None
    ]
    faulty = [f"Not counted: {text(where)}: {text(why)}." for where, why in sorted(evidence.faulty.items())]
    for items in (disputes, faulty):
        told += [item if not left else f"{left:,} more." for item, left in shortened(items)]
    parts += ["<ul>" + "".join(f"<li>{item}</li>" for item in told) + "</ul>"] if told else []
    return section("against", "What speaks against it", *parts)


def proven(standing: Standing, steps: int) -> str:
    """The arithmetic: k audits of N steps, and how many false steps they would have met."""
    found = standing.proven
    if not steps:
        return ""
    formula = (
        "If <var>c</var> of <var>N</var> steps were false, <var>k</var> audits of steps drawn at random would meet one "
        "with probability 1 − (1 − <var>k</var>/<var>N</var>)<sup><var>c</var></sup>, if every draw saw the whole run. "
        "A draw by the head after <var>n</var> steps can meet false ones among these alone; as nobody knows where they "
        "lie, what stands here is the least probability, wherever they do. A step that its auditor chose proves itself "
        "alone and is not among the <var>k</var>."
    )
    smallest = "none" if found.smallest is None else f"{found.smallest:,}"
    pairs = {
        "Steps, <var>N</var>": f"{steps:,}",
        "Drawn and audited by counted keys, <var>k</var>": f"{found.audited:,}",
        "of these on the trainer's word alone": f"{found.on_word:,}",
        "Drawn and not audited, false ones may be among them": f"{found.unaudited:,}",
        "Steps after every draw of audited ones": f"{steps - max((n for n, _ in found.heads), default=0):,}",
        "Smallest <var>c</var> that would have been met with 95&nbsp;%": smallest,
    }
    examples = [bad for bad in EXAMPLES if bad <= steps]
    rows = [(f"{bad:,}", f"{100 * found.detection(bad):.2f}&nbsp;%") for bad in examples]
    chances = table(("If so many steps were false", "An audit would have met one with"), rows, (0, 1))
    return section("proven", "What was proven", f"<p>{formula}</p>", facts(pairs), chances if found.audited else "")


def draws(standing: Standing) -> str:
    """Every drawn step by night: by which value, on whose word, and what became of it."""
    known = {draw.digest(): draw for draw in standing.evidence.draws}
    number = Counter(draw.date for draw in known.values())
    rows = [_draw(row, _value(known[row.draw], number[row.date])) for row in standing.rows]
    nights = text(", ".join(standing.waiting))
    waiting = f"<p>Stated, and the round still to come: {nights}.</p>" if nights else ""
    states = "".join(f"<li><strong>{n:,} {s}</strong>: {STATES[s]}</li>" for s, n in sorted(standing.states.items()))
    heads = ("Night", "Step", "State", "By", "Beacon", "Seen before its round")
    shown = _newest(heads, rows[::-1], (1,)) if rows else "<p>No step was drawn.</p>"
    return section("draws", "Draws", waiting, f"<ul>{states}</ul>" if states else "", shown)


def _value(draw: Draw, draws: int) -> str:
    """By which value a step was drawn, in one of so many draws of its night."""
    beacon = draw.beacon
    one = f"{beacon.scheme}, round {beacon.round:,}"
    return one if draws == 1 else f"{one}, {beacon.value[:16]}…: one of {draws} draws of this night"


def _draw(row: DrawnStep, beacon: str) -> tuple[str, ...]:
    who = [name(who) for who in row.names] + [text(part) for part in row.parts]
    who += [f"{name(who)} (no match)" for who in row.against]
    who += [f"{row.unlisted:,} unlisted"] if row.unlisted else []
    on = f" ({text(', '.join(row.backends))})" if row.backends else ""
    by = (", ".join(who) or "nobody") + on
    return moment(row.date), f"{row.step:,}", text(row.state), by, text(beacon), name(row.basis)


def certificates(standing: Standing) -> str:
    """Every certificate, the newest first, and the keys that signed them."""
    bodies = sorted(standing.evidence.certificates, key=lambda body: (body.ended, body.canonical()), reverse=True)
    if not bodies:
        return section("certificates", "Certificates", "<p>There are none here.</p>")
    heads = ("Key", "Whose", "Piece", "Verdict", "Backend", "Drawn on", "Ended")
    rows = [_certificate(body, standing) for body in bodies]
    return section("certificates", "Certificates", _newest(heads, rows, ()), _keys(standing, bodies))


def _whose(standing: Standing, key: str) -> str:
    """The name of a key that is counted, else that it has none."""
    return name(standing.named.get(key, f"unlisted key {key[:16]}"))


def _certificate(body: Body, standing: Standing) -> tuple[str, ...]:
    passed = f", and {body.step - body.first_step:,} before it" if body.step and body.first_step < body.step else ""
    return (
        begun(body.auditor),
        name(standing.named[body.auditor]) if body.auditor in standing.named else "unlisted",
        text(body.piece) + passed,
        text(body.verdict),
        f"{text(body.provenance.backend)}, {name(body.provenance.device)}",
        moment(body.draw.date) if body.draw else "own choice",
        moment(body.ended),
    )


def _keys(standing: Standing, bodies: list[Body]) -> str:
    keys = sorted({body.auditor for body in bodies}, key=lambda key: (key not in standing.named, key))
    number = Counter(body.auditor for body in bodies)
    rows = [
        (code(key), name(standing.named[key]) if key in standing.named else "unlisted", f"{number[key]:,}")
        for key, _ in shortened(keys)
    ]
    why = "<p>Keys are not people: whoever holds two can sign twice. Count those whose owners you know.</p>"
    return more(f"{count(len(keys), 'key')} in full", why + table(("Key", "Whose", "Certificates"), rows, (2,)))


def seen_heads(standing: Standing) -> Iterator[str]:
    """Who saw which head of the ledger, for the newest statement that anyone witnessed."""
    words = by_statement(standing.evidence)
    for statement in sorted(standing.evidence.statements, key=lambda s: s.body.date, reverse=True):
        seen = sorted({w.body.witness for w in words.get(statement.digest(), ()) if in_time(w, statement)})
        if seen:
            who = ", ".join(_whose(standing, key) for key in seen)
            yield f"the head after {count(statement.body.step, 'step')}, on {text(statement.body.date)}, by {who}"
            return


def _newest(heads: tuple[str, ...], rows: list[tuple[str, ...]], numbers: tuple[int, ...]) -> str:
    """A table of the first rows, and the others where they are asked for."""
    shown, rest, left = rows[:ROWS], rows[ROWS:KEPT], len(rows) - KEPT
    lost = f"<p>{left:,} earlier: <code>verbatim coverage --json</code> lists them.</p>" if left > 0 else ""
    earlier = more(f"{len(rest):,} earlier", table(heads, rest, numbers) + lost) if rest else ""
    return table(heads, shown, numbers) + earlier
