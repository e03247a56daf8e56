"""What a release may hold: every key belongs to exactly one class, and what fits none is not published.

mix      windows, held_out, manifest, index, tokenizer, made_with
run      recipe, ledger, digests, checkpoints, segments, diagnostics, probe
audits   statements, witnesses, draws, beacons, certificates, disputes, evaluations    an auditor's, below audits/
made     code, lock, export, page                   made when the run is published

RELEASE.json lists what was there when it was signed. What is made later is found by listing two prefixes, and proves
itself: records below audits/ by their own signatures, openings below opened/ by the ledger's roots.
"""

import re

_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_BELOW = rf"{_PART}(/{_PART})*"
_STEP = r"\d{8}"
_MIX = {
    "windows": rf"mix/windows/{_PART}/train/{_BELOW}",
    "held_out": rf"mix/windows/{_PART}/held_out/{_BELOW}",
    "manifest": r"mix/manifest\.json",
    "index": rf"mix/docs/{_BELOW}",
    "tokenizer": r"mix/tokenizer\.json",
    "made_with": r"mix/made-with\.json",
}
_RUN = {
    "recipe": r"recipe\.yaml",
    "ledger": rf"ledger/(header\.json|{_STEP}\.jsonl)",
    "digests": rf"digests/{_STEP}\.json",
    "checkpoints": rf"checkpoints/{_STEP}\.json|objects/[0-9a-f]{{64}}",
    "segments": rf"segments/{_PART}\.json",
    "diagnostics": rf"diagnostics/{_STEP}\.json",
    "probe": rf"probe/{_STEP}\.json",
}
_RECORDS = ("statements", "witnesses", "draws", "beacons", "certificates", "disputes", "evaluations")
_AUDITS = {name: rf"audits/{name}/{_BELOW}" for name in _RECORDS}
_MADE = {
    "code": r"code/[0-9a-f]{64}\.tar",
    "lock": r"code/constraints\.txt",
    "export": rf"export/{_PART}",
    "page": r"index\.html",
}
_PATTERNS = {name: re.compile(pattern, re.ASCII) for name, pattern in (_MIX | _RUN | _AUDITS | _MADE).items()}
CLASSES = tuple(_PATTERNS)
RUN_CLASSES = tuple(_RUN)
AUDIT_CLASSES = tuple(_AUDITS)
MADE_CLASSES = tuple(_MADE)
_OPENED = re.compile(rf"opened/(checkpoints/{_STEP}\.json|objects/[0-9a-f]{{64}}|openings/{_STEP}\.json)", re.ASCII)


def class_of(key: str) -> str:
    """The class of a key in a release; "" if it fits none."""
    return next((name for name, pattern in _PATTERNS.items() if pattern.fullmatch(key)), "")


def may_come_later(key: str) -> bool:
    """Whether an object under this key may be made after the release was signed, and then be in no list."""
    return class_of(key) in AUDIT_CLASSES or _OPENED.fullmatch(key) is not None
