"""Runs that were never trained, of any length, with everything that a report page can show; each record verifies.

python -m tests.browser.made_up FOLDER [STEPS]    writes FOLDER/report.html by `verbatim coverage`
"""

import math
import sys
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from flows.cli import app
from kernels import canonical
from kernels.digest import digest
from model.spec import Phase, RunSpec, ScheduleSpec
from storage import checkpoint
from storage.audit.certificate import Beacon, DrawReference, sign
from storage.audit.dispute import save_dispute
from storage.audit.draw import Draw
from storage.audit.settle import draw_once
from storage.audit.statement import Statement, announce
from storage.audit.witness import bear_witness
from storage.figures import Diagnostics, Probe, SourceLoss, diagnostics_key, probe_key
from storage.ledger import Entry, Ledger, part_key
from storage.segment import begin, end
from tests.storage.drawn import Book, Hourly, at, disputed, hourly, provenance
from tests.storage.small import SEQ_LEN, spec

HOSTILE = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>\u202e"
PEOPLE = ("Anna", "Babak", HOSTILE.removesuffix("\u202e"))  # a file of names refuses what steers
RECIPE = b"name: made up # </pre><script>alert(3)</script>\nplan: {checkpoint_every: 100}\n"
PART = 10_000  # entries in a part of the ledger


@dataclass(frozen=True)
class Shape:
    """How long a run is, and what happens in it."""

    steps: int
    checkpoint_every: int
    nights: int
    drawn_a_night: int
    certificates: int  # of others, beside the answers to draws


SMALL = Shape(steps=40, checkpoint_every=5, nights=14, drawn_a_night=1, certificates=2)
OPEN_1B = Shape(steps=80_957, checkpoint_every=100, nights=120, drawn_a_night=2, certificates=60)


def made_up(folder: Path, shape: Shape) -> Book:
    """A run of this shape below the folder, with records and a file of named keys."""
    book = Book(folder, steps=0, of=_spec(shape.steps))
    _entries(book, shape.steps)
    book.ledger = Ledger(book.published)
    _figures(book, shape)
    _segments(book, shape.steps)
    book.published.create("recipe.yaml", RECIPE)
    _audits(book, shape)
    named = book.named("anna", "babak", "carol")
    names = dict(zip(("anna", "babak", "carol"), PEOPLE, strict=True))
    lines = [f"{key} {names[who]}\n" for key, who in named.items()]
    (folder / "keys.txt").write_text("".join(lines), encoding="utf-8")
    return book


def _spec(steps: int) -> RunSpec:
    tokens = 2 * SEQ_LEN * steps
    phases = (Phase(from_tokens=0, windows=2),)
    schedule = ScheduleSpec(peak_lr="0.003", warmup_tokens=64, total_tokens=tokens, phases=phases)
    return spec(name="made-up", schedule=schedule)


def report(book: Book, named: bool = True) -> Path:
    """The page that `verbatim coverage` makes of it."""
    file = book.folder / "report.html"
    who = ["--named", str(book.folder / "keys.txt")] if named else []
    arguments = ["coverage", str(book.published.root), "--records", str(book.records.root), *who, "--page", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        hourly(patch)
        patch.setattr(checkpoint, "check_there", lambda *given: None)  # a made-up state proves nothing
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert file.exists(), done.output
    return file


def _entries(book: Book, steps: int) -> None:
    random, head, lines, first = np.random.default_rng(1), book.ledger.head, list[bytes](), 0
    for step in range(steps):
        entry = _entry(step, steps, head, random)
        head = entry.digest()
        lines.append(entry.canonical() + b"\n")
        if len(lines) == PART or step == steps - 1:
            book.published.create(part_key(first), b"".join(lines))
            lines, first = [], step + 1


def _entry(step: int, steps: int, previous: str, random: np.random.Generator) -> Entry:
    event, state = _event(step, steps), digest(step.to_bytes(8, "big"), "test")
    norm = 8.0 + step % 5 if event == "spike" else 0.4 + 3 * math.exp(-20 * step / steps) + abs(random.normal()) * 0.1
    loss = 2.4 + 6.2 * math.exp(-9 * step / steps) + random.normal() * 0.05
    gone = event == "nonfinite"
    return Entry(
        step=step,
        tokens=32 * (step + 1),
        first_window=2 * step,
        windows=2,
        lr=canonical.bits(np.float32(0.003)),
        loss=None if gone else canonical.bits(np.float32(loss)),
        z_loss=None if gone else canonical.bits(np.float32(0)),
        grad_norm=None if gone else canonical.bits(np.float32(norm)),
        batch=state,
        gradient=None if gone else state,
        state=state,
        event=event,
        clipped=norm > 1 and not event,
        previous=previous,
    )


def _event(step: int, steps: int) -> str:
    at = step * 1000 // steps if steps > 1000 else step * 25
    if steps > 1000 and step % 7919 == 5000:
        return "spike"
    if steps > 1000 and 5000 < step % 7919 <= 5004:
        return "cooldown"
    return {300: "spike", 325: "cooldown", 700: "nonfinite"}.get(at, "") if steps <= 1000 else ""


def _figures(book: Book, shape: Shape) -> None:
    random, ledger = np.random.default_rng(2), book.ledger
    for k in [*range(0, shape.steps, shape.checkpoint_every), shape.steps]:
        book.published.create(f"checkpoints/{k:08d}.json", b"{}")
        loss = canonical.bits(np.float32(2.45 + 6.1 * math.exp(-9 * k / shape.steps) + random.normal() * 0.02))
        probe = Probe(
            step=k,
            state=ledger.state_root(k),
            held_out_root=ledger.header.held_out_root,
            sources={"web": SourceLoss(loss=loss, windows=8)},
        )
        book.published.create(probe_key(k), probe.canonical())
    for step in range(0, shape.steps, max(1, shape.steps // 200)):
        tensors = {f"layer{i}.ffn": _tensor(step / shape.steps, i) for i in range(12)} | {HOSTILE: _tensor(0.5, 3)}
        book.published.create(diagnostics_key(step), Diagnostics(step=step, tensors=tensors).canonical())


def _tensor(done: float, number: int) -> dict[str, object]:
    grown = 1 + (0.6 + 0.05 * number) * done
    return {
        "weight_norm": canonical.bits(np.float32(10 * grown)),
        "elements": 1000,
        "largest_step": canonical.bits(np.float32(0.01 * (1 + 0.3 * done * math.sin(number)))),
        "codes_at_rim": 10 + int(20 * done) + number,
    }


def _segments(book: Book, steps: int) -> None:
    """Three: paused, killed, and finished after it repeated a few steps."""
    run, where = book.ledger.run_id, provenance("nvidia")
    first = begin(book.published, run, 0, 0, steps // 3, where, 2)
    end(book.published, first, steps // 3, 0, "paused")
    begin(book.published, run, steps // 3, steps // 3, steps, where, 2)
    last = begin(book.published, run, steps // 2, steps // 2 + max(3, steps // 40), steps, where, 4)
    end(book.published, last, steps, max(3, steps // 40), "finished", HOSTILE)


def _audits(book: Book, shape: Shape) -> None:
    """Every state of a drawn step: of the last nights due, of the first all others. Every fifth draw is witnessed."""
    today, random = datetime.now(UTC).date(), np.random.default_rng(3)
    with pytest.MonkeyPatch.context() as patch:
        source = hourly(patch)
        for back in range(shape.nights, 0, -1):
            night = today - timedelta(days=back)
            if back % 5:
                draw = _draw(book, night, back, shape.drawn_a_night)
            else:
                draw = _witnessed_draw(book, night, source, shape.drawn_a_night)
            for step in draw.steps:
                _answer(book, draw, step, back)
    for step in random.choice(shape.steps, shape.certificates, replace=False).tolist():
        book.certify("mallory", step, first=max(0, step - step % shape.checkpoint_every))


def _draw(book: Book, night: date, number: int, count: int) -> Draw:
    return book.draw(night.isoformat(), count, Beacon(scheme="file", round=number, value=f"{number:064x}"))


def _witnessed_draw(book: Book, night: date, source: Hourly, count: int) -> Draw:
    """Stated, seen by another in time, and drawn by a value of a round that came out later."""
    stated = at(night.isoformat())
    statement = announce(book.records, book.ledger, book.trainer, night.isoformat(), count, source, stated)
    assert isinstance(statement, Statement)
    bear_witness(book.records, book.ledger, book.key("carol"), statement, stated)
    return draw_once(book.records, book.ledger, statement, source, stated + timedelta(hours=2))


ANSWERS = ("nobody", "confirmed", "disputed", "part", "opened", "attested")  # by the nights that went by, over and over


def _answer(book: Book, draw: Draw, step: int, back: int) -> None:
    answer, reference = ANSWERS[back % len(ANSWERS)], draw.reference()
    if answer in ("attested", "confirmed"):
        book.certify("anna", step, draw=reference)
    if answer == "confirmed":
        book.certify("babak", step, "nvidia", draw=reference)
    if answer == "disputed":
        _dispute(book, step, reference)
    if answer == "part":
        _certify_unit(book, reference, step)
    if answer == "opened":
        book.published.create(f"opened/checkpoints/{step:08d}.json", b"{}")
        book.published.create(f"opened/openings/{step:08d}.json", b"{}")


def _dispute(book: Book, step: int, draw: DrawReference) -> None:
    """A no-match with its dispute file."""
    other = book.ledger[step].model_copy(update={"state": digest(b"another", "test")})
    body = book.certify("anna", step, verdict="no-match", reproduced=other, draw=draw)
    save_dispute(book.records, disputed(sign(body, book.key("anna")), book.key("anna")))


def _certify_unit(book: Book, draw: DrawReference, step: int) -> None:
    one = digest(b"unit", "test")
    beacon = Beacon(scheme="file", round=1, value="ab" * 32)
    book.certify("carol", step, piece=f"step {step} unit 1", recorded=one, reproduced=one, draw=draw, beacon=beacon)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    chosen = OPEN_1B if len(sys.argv) > 2 and int(sys.argv[2]) > 1000 else SMALL
    print(report(made_up(place, chosen)))
