"""Disputes in plain Python, without Prefect: what `verbatim accuse` and `verbatim dispute` call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from storage.audit import dispute
from storage.audit.certificate import save_certificate
from storage.audit.keys import load_or_create_key
from storage.audit.verdict import Report
from storage.errors import InputFault
from storage.mirrors import open_copies
from storage.named import read_file
from storage.store import open_store


def accuse(
    copies: Sequence[str], step: int, backend: str, second: str, records: str, keys: str, report: Report
) -> dict[str, Any]:
    """Audit a step with the digests of all operations; keep certificate and dispute file in `records`.

    copies: addresses of the release, the preferred first.
    Returns the verdict's document, with the addresses `certificate` and `dispute`, None without one.
    """
    key = load_or_create_key(Path(keys), "auditor")
    verdict, data = dispute.accuse(open_copies(copies), step, backend, second, key, report)
    kept = open_store(records)
    certificate = _address(records, save_certificate(kept, verdict.certificate)) if verdict.certificate else None
    file = _address(records, dispute.save_dispute(kept, data)) if data else None
    return verdict.document() | {"certificate": certificate, "dispute": file}


def judge(file: Path, copies: Sequence[str], backend: str, records: str, keys: str, report: Report) -> dict[str, Any]:
    """Who is right in a dispute; keep the certificate of the judge's own audit in `records`.

    copies: addresses of the release, the preferred first.
    Returns the judgement's document, with the address `certificate`, None without one.
    """
    try:
        data = read_file(file, dispute.MAX_DISPUTE)
    except OSError as error:
        raise InputFault(f"{file} cannot be read: {error.strerror}", cause="a wrong name") from None
    judgement = dispute.judge(open_copies(copies), data, backend, load_or_create_key(Path(keys), "auditor"), report)
    certificate = judgement.verdict.certificate
    saved = _address(records, save_certificate(open_store(records), certificate)) if certificate else None
    return judgement.document() | {"certificate": saved}


def _address(records: str, key: str) -> str:
    return f"{records}/{key}"
