"""index.html: what a published run is, and how to check it, readable in the store itself by any browser.

One file without script, font, image or address of any other place; links lead to the objects beside it. It follows from
the run alone, so a mirror serves the same bytes. Whatever comes from a record is escaped.
"""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import TypeVar

from kernels import canonical
from storage import checkpoint
from storage.classes import CLASSES, class_of
from storage.code_archive import archive_key
from storage.curve import loss_curve
from storage.figures import load_probe, probe_key
from storage.release import RELEASE_KEY
from storage.run import Run

PAGE_KEY = "index.html"
LISTED = 60  # objects of a class that are linked one by one; of more, the first and the last
MEANING = {
    "windows": "the text as it was trained on, in windows of tokens, with a digest of each",
    "held_out": "windows that no step saw",
    "manifest": "what the mix is, under its root",
    "index": "which document lies in which window",
    "tokenizer": "the tokenizer",
    "made_with": "versions that the windows were made with",
    "recipe": "the recipe with which the run was begun",
    "ledger": "the header, then one entry for each step: a chain of digests",
    "digests": "the digest of every tensor after each step",
    "checkpoints": "states of the model and its optimizer, in safetensors",
    "segments": "what really ran, where and when",
    "diagnostics": "norms and quantiser steps of some steps",
    "probe": "held-out losses",
    "statements": "what the trainer signed before each draw: head, night, round to come",
    "witnesses": "who saw these statements in time",
    "draws": "which steps a public random value chose for an audit",
    "beacons": "those random values",
    "certificates": "signed results of audits",
    "disputes": "accusations that anyone can judge",
    "code": "the code, as a tar that nothing compresses",
    "lock": "exact versions of every dependency",
    "export": "the last weights for plain code, and a short program that loads them",
    "page": "this page",
}
T = TypeVar("T")
STYLE = (
    ":root{color-scheme:light dark;--line:#8886;--train:#2563c9;--held:#c2410c}"
    "@media(prefers-color-scheme:dark){:root{--train:#7fb0ff;--held:#ff9d66}}"
    "body{font:1rem/1.5 system-ui,sans-serif;max-width:52rem;margin:0 auto;padding:1rem}"
    "h1,h2{line-height:1.2}code,pre{font-family:ui-monospace,monospace;font-size:.9em}"
    "code,dd,td a{overflow-wrap:anywhere}pre{overflow-x:auto;padding:.75rem;border:1px solid var(--line)}"
    "dt{font-weight:600}dd{margin:0 0 .5rem}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;vertical-align:top;padding:.4rem;border-bottom:1px solid var(--line)}"
    ".number{text-align:right;white-space:nowrap}a,summary{padding:.15rem 0}ul{padding-left:1.2rem}"
    ":focus-visible{outline:3px solid var(--train);outline-offset:2px}"
    "svg{width:100%;height:auto}svg text{fill:currentColor;font-size:12px}.grid{stroke:var(--line)}"
    ".train{fill:none;stroke:var(--train);stroke-width:2}.held-out{fill:var(--held)}"
)


def page(run: Run, sizes: Mapping[str, int], code: str) -> bytes:
    """The page of a release. sizes: bytes of every other object, by key; code: digest of the archived code."""
    held_out = _held_out(run, sizes)
    parts = (
        f"<h1>{escape(run.spec.name)}: a training run that anyone can replay</h1>",
        _summary(run),
        f"<h2>Loss</h2>{_curve(run, held_out)}",
        f"<h2>Check it</h2>{_check(run, code)}",
        f"<h2>Use it</h2>{_use(sizes)}",
        f"<h2>Checkpoints</h2>{_checkpoints(sizes, held_out)}",
        f"<h2>What is here</h2>{_classes(sizes)}",
        f"<h2>Names</h2>{_names(run, code)}",
    )
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(run.spec.name)}: run {run.ledger.run_id[:16]}</title><style>{STYLE}</style></head><body><main>"
    )
    return (head + "\n".join(parts) + "</main></body></html>\n").encode()


def _summary(run: Run) -> str:
    m, steps = run.spec.model, len(run.ledger)
    tokens = run.ledger[steps - 1].tokens if steps else 0
    return (
        f"<p>A language model of {m.parameter_count():,} parameters ({m.layers} layers of width {m.d_model}, "
        f"vocabulary {m.vocab:,}), trained for {steps:,} of {run.steps:,} steps on {tokens:,} tokens. From the state "
        "before a step and its windows follows the state after it, bit for bit, on any machine. So whoever doubts a "
        "step can replay it, from what lies here alone.</p>"
    )


def _curve(run: Run, held_out: Mapping[int, float | None]) -> str:
    losses = [None if entry.loss is None else float(canonical.from_bits(entry.loss)) for entry in run.ledger]
    last = [loss for loss in held_out.values() if loss is not None][-1:]
    held = f" and {last[0]:.3f} on windows that no step saw (dots)" if last else ""
    ends = f"{losses[-1]:.3f} in the last step (line)" if losses and losses[-1] is not None else "no finite loss"
    return f"{loss_curve(losses, held_out)}<p>Nats a token: {ends}{held}.</p>"


def _held_out(run: Run, sizes: Mapping[str, int]) -> dict[int, float | None]:
    """Mean held-out loss of every state that was probed, in order."""
    probed = [step for step in range(len(run.ledger) + 1) if probe_key(step) in sizes]
    means = {step: load_probe(run.store, run.ledger, step).mean() for step in probed}
    return {step: None if mean is None else float(mean) for step, mean in means.items()}


def _check(run: Run, code: str) -> str:
    step = max(len(run.ledger) - 1, 0)
    commands = (
        "mkdir verbatim",
        f"tar -xf {archive_key(code)} -C verbatim",
        "cd verbatim",
        "python3 -m venv .venv",
        ".venv/bin/pip install -c constraints.txt -e '.[s3]'",
        ".venv/bin/verbatim verify ADDRESS    # every byte and signature; nothing is replayed",
        ".venv/bin/verbatim audit ADDRESS --initial    # the weights before the first step, drawn anew",
        f".venv/bin/verbatim audit ADDRESS --step {step}    # or any other from 0: the whole step, compared",
    )
    return (
        "<p>ADDRESS is where this page lies, such as <code>s3://bucket/run</code>, or a folder with a copy of it all. "
        "Python 3.11 or newer is needed. The code is in this release, and you may take it from elsewhere: an auditor's "
        f"need not be the trainer's.</p><pre>{escape(chr(10).join(commands))}</pre>"
    )


def _use(sizes: Mapping[str, int]) -> str:
    files = [key for key in sizes if class_of(key) == "export"]
    if not files:
        return "<p>There are no weights yet: the run has no checkpoint.</p>"
    return (
        "<p>Fetch these into one folder. Nothing of them can run code but the program, which is short.</p>"
        f"<ul>{_links(sizes, files)}</ul>"
        "<pre>pip install torch safetensors tokenizers\npython load.py &quot;Once upon a time&quot;</pre>"
    )


def _checkpoints(sizes: Mapping[str, int], held_out: Mapping[int, float | None]) -> str:
    steps = [int(key[12:20]) for key in sorted(sizes) if key.startswith("checkpoints/")]
    rows = []
    for step, left_out in _shortened(steps):
        if left_out:
            rows.append(f'<tr><td colspan="2">{left_out:,} more</td></tr>')
            continue
        loss = held_out.get(step)
        shown = "" if loss is None else f"{loss:.3f}"
        key = checkpoint.checkpoint_key(step)
        rows.append(
            f'<tr><td><a href="{escape(key)}">after {step:,} steps</a></td><td class="number">{shown}</td></tr>'
        )
    return _table(("State", "Held-out loss, nats"), rows)


def _classes(sizes: Mapping[str, int]) -> str:
    rows = []
    for name in CLASSES:
        keys = [PAGE_KEY] if name == "page" else sorted(key for key in sizes if class_of(key) == name)
        size = "" if name == "page" else _bytes(sum(sizes[key] for key in keys))
        links = f"<details><summary>{escape(name)}</summary><ul>{_links(sizes, keys)}</ul></details>" if keys else name
        rows.append(
            f'<tr><td>{links}</td><td>{MEANING[name]}</td><td class="number">{len(keys):,}</td>'
            f'<td class="number">{size}</td></tr>'
        )
    return (
        f'<p><a href="{RELEASE_KEY}">{RELEASE_KEY}</a>, signed by the trainer, lists every object with its digest.</p>'
        + _table(("Class", "What it is", "Objects", "Bytes"), rows)
    )


def _links(sizes: Mapping[str, int], keys: list[str]) -> str:
    items = []
    for key, left_out in _shortened(keys):
        size = f" ({_bytes(sizes[key])})" if key in sizes else ""
        link = f'<a href="{escape(key)}">{escape(key)}</a>{size}'
        items.append(f"<li>{left_out:,} more, listed in {RELEASE_KEY}</li>" if left_out else f"<li>{link}</li>")
    return "".join(items)


def _names(run: Run, code: str) -> str:
    header = run.ledger.header
    same = "as declared when the run began" if code == header.code else f"the run began with {header.code}"
    facts = {
        "Run id": run.ledger.run_id,
        "Ledger head": run.ledger.head,
        "Trajectory root": run.ledger.trajectory_root(),
        "Mix root": header.mix_root,
        "Initial state": header.initial_root,
        "Trainer's key": header.trainer,
        "Code": f"{code}, {same}",
    }
    return "<dl>" + "".join(f"<dt>{k}</dt><dd><code>{escape(v)}</code></dd>" for k, v in facts.items()) + "</dl>"


def _table(heads: Iterable[str], rows: list[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _shortened(items: list[T]) -> Iterator[tuple[T, int]]:
    """(item, 0) of each; of more than LISTED the first and the last, and between them (item, number left out)."""
    half = LISTED // 2
    for index, item in enumerate(items):
        if len(items) <= LISTED or index < half or index >= len(items) - half:
            yield item, 0
        elif index == half:
            yield item, len(items) - LISTED


def _bytes(size: int) -> str:
    return f"{size:,}"
