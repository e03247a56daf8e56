"""The page's account of what lies in the store: how to check it, how to use it, every object by class."""

from storage.classes import CLASSES, class_of
from storage.code_archive import archive_key
from storage.page.markup import Place, count, more, section, shortened, table, text
from storage.release import RELEASE_KEY

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
    "evaluations": "signed scores on tasks",
    "code": "the code, as a tar that nothing compresses",
    "lock": "exact versions of every dependency",
    "export": "the last weights for plain code, and a short program that loads them",
    "page": "this page, as it was when the run was published",
}


def check(steps: int, code: str) -> str:
    """Commands with which a stranger checks the run. code: digest of the archived code, "" without."""
    install = (
        "mkdir verbatim",
        f"tar -xf {archive_key(code)} -C verbatim",
        "cd verbatim",
        "python3 -m venv .venv",
        ".venv/bin/pip install -c constraints.txt -e '.[s3]'",
    )
    commands = (
        *(install if code else ()),
        ".venv/bin/verbatim verify ADDRESS    # every byte and signature; nothing is replayed",
        ".venv/bin/verbatim audit ADDRESS --initial    # the weights before the first step, drawn anew",
        f".venv/bin/verbatim audit ADDRESS --step {max(steps - 1, 0)}    # or any other: the whole step, compared",
        ".venv/bin/verbatim coverage ADDRESS --records RECORDS --named KEYS.txt --page report.html    # this page",
    )
    return section(
        "check",
        "Check it",
        "<p>Nobody signed this page. ADDRESS is where the run lies, such as <code>s3://bucket/run</code>, or a folder "
        "with a copy of it all; RECORDS where draws and certificates do; KEYS.txt has a line for each key that you "
        "count, 64 hex digits and a name. Python 3.11 or newer is needed. The code is in the release, and you may take "
        "it from elsewhere: an auditor's need not be the trainer's.</p>",
        f"<pre>{text(chr(10).join(commands))}</pre>",
    )


def use(place: Place) -> str:
    """The last weights for plain code."""
    files = [key for key in place.sizes if class_of(key) == "export"]
    if not files:
        return section(
            "use", "Use it", "<p>No weights for plain code lie here: a release with a checkpoint has them.</p>"
        )
    return section(
        "use",
        "Use it",
        "<p>Fetch these into one folder. Nothing of them can run code but the program, which is short.</p>",
        f"<ul>{_links(place, files)}</ul>",
        "<pre>pip install torch safetensors tokenizers\npython load.py &quot;Once upon a time&quot;</pre>",
    )


def classes(place: Place) -> str:
    """Every object by class, with links."""
    keys: dict[str, list[str]] = {known: [] for known in CLASSES}
    for key in sorted(place.sizes):
        if kind := class_of(key):
            keys[kind].append(key)
    rows = [_class(place, kind, found) for kind, found in keys.items()]
    signed = f"{place.link(RELEASE_KEY)}, signed by the trainer, lists every object with its digest."
    unsigned = (
        f"There is no {RELEASE_KEY}: this is not a finished publication, and nobody signed a list of its objects."
    )
    return section(
        "here",
        "What is here",
        f"<p>{signed if RELEASE_KEY in place.sizes else unsigned}</p>",
        table(("Class", "What it is", "Objects", "Bytes"), rows, (2, 3)),
    )


def _class(place: Place, kind: str, keys: list[str]) -> tuple[str, ...]:
    links = more(kind, f"<ul>{_links(place, keys)}</ul>") if keys else kind
    sizes = [size for key in keys if (size := place.sizes.get(key)) is not None]
    return links, MEANING[kind], f"{len(keys):,}", f"{sum(sizes):,}" if sizes else ""


def _links(place: Place, keys: list[str]) -> str:
    items = []
    for key, left in shortened(keys):
        size = place.sizes.get(key)
        shown = place.link(key) + ("" if size is None else f" ({count(size, 'byte')})")
        items.append(f"<li>{left:,} more, listed in {RELEASE_KEY}</li>" if left else f"<li>{shown}</li>")
    return "".join(items)
