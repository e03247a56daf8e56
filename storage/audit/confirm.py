"""Before a no-match may be filed: the conformance vectors again in this process, and the audit again in a fresh one.

A device or an allocator can be wrong in the same way for as long as a process lives, so that repeating the step there
proves nothing. A no-match stands only if a process without a history comes to it too, in every field.
"""

import subprocess
import sys
import time
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO, Literal, Self

from pydantic import ValidationError

from kernels import canonical
from storage import engine
from storage.audit.verdict import AuditProgress, Outcome, Report, Verdict
from storage.errors import MachineFault, printable
from storage.mirrors import stores_of
from storage.provenance import PROJECT
from storage.records import Count, Record, Text
from storage.store import Store

MAX_LINE = 1 << 20
CAUSE = "faulty memory or processor, or too little memory"
NEXT = "audit on another machine; this one says nothing about the run"


class Stage(Record):
    """How far the fresh process is: AuditProgress, in whole seconds."""

    kind: Literal["stage"] = "stage"
    stage: Text
    step: Count | None
    done: Count
    of: Count
    seconds_left: Count | None


class Finding(Record):
    """What one process found: a Verdict without what differs between two processes that agree."""

    kind: Literal["finding"] = "finding"
    verdict: Text
    piece: Text
    detail: str
    compared: list[Count]
    differs_at: Count | None
    fields: list[Text]
    tensors: list[Text]
    fault: Text

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        """The finding of a verdict."""
        document = verdict.document()
        return cls(**{name: document[name] for name in cls.model_fields if name != "kind"})


def confirmed(store: Store, verdict: Verdict, backend: str, report: Report) -> Verdict:
    """The verdict; a machine fault in its place if it is a no-match that this machine cannot find twice."""
    if verdict.outcome is not Outcome.NO_MATCH:
        return verdict
    began = time.monotonic()
    try:
        report(AuditProgress("self-test", None, 0, 0, None))
        engine.self_test(backend, lambda text: report(AuditProgress(text, None, 0, 0, None)))
        _check_same(
            Finding.of(verdict), repeat([copy.uri for copy in stores_of(store)], verdict.piece, backend, report)
        )
    except MachineFault as error:
        verdict = Verdict(
            Outcome.MACHINE_FAULT, verdict.piece, str(error), seconds=verdict.seconds, bad_copies=verdict.bad_copies
        )
    return replace(verdict, seconds=verdict.seconds + time.monotonic() - began)


def _check_same(used: Finding, fresh: Finding) -> None:
    if used != fresh:
        again, first = (finding.detail.partition("\n")[0] for finding in (fresh, used))
        raise MachineFault(
            f"{used.piece} came out differently when it was repeated in a fresh process on this machine: "
            f"{fresh.verdict}: {again}; at first: {first}",
            cause=CAUSE,
            next_step=NEXT,
        )


def repeat(uris: list[str], piece: str, backend: str, report: Report) -> Finding:
    """What a fresh process finds. MachineFault if it dies, fails or says anything but progress and one finding."""
    command = [sys.executable, "-m", "storage.audit.again", piece, backend, *uris]
    with TemporaryFile() as errors:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, cwd=PROJECT
        ) as child:
            try:
                assert child.stdout is not None
                finding = _listen(child.stdout, report)
            except BaseException:  # a person's interruption, or nonsense that is not worth waiting for the end of
                child.kill()
                raise
        if child.returncode or finding is None:
            raise _failed(piece, child.returncode, errors)
    return finding


def _listen(output: IO[bytes], report: Report) -> Finding | None:
    """The finding, which must be the last line; None if there is none before the process ends."""
    finding = None
    while line := output.readline(MAX_LINE):
        if len(line) < MAX_LINE and not line.endswith(b"\n"):  # it died in the middle of a line
            return None
        said = None if finding else _parsed(line)
        if said is None:
            raise MachineFault(
                f"the repetition in a fresh process said what is no finding: {printable(repr(line[:100]))}",
                cause=CAUSE,
                next_step=NEXT,
            )
        if isinstance(said, Finding):
            finding = said
        else:
            stage = f"repetition: {said.stage}"
            report(AuditProgress(stage, said.step, said.done, said.of, said.seconds_left))
    return finding


def _parsed(line: bytes) -> Stage | Finding | None:
    try:
        document = canonical.loads(line.removesuffix(b"\n"))
        form = Stage if isinstance(document, dict) and document.get("kind") == "stage" else Finding
        return form.model_validate(document)
    except (canonical.NotCanonical, ValidationError):
        return None


def _failed(piece: str, status: int, errors: IO[bytes]) -> MachineFault:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status} and without a finding"
    errors.seek(max(0, errors.seek(0, 2) - 4096))
    last = errors.read().decode(errors="replace").rstrip().rpartition("\n")[2] or "it said nothing"
    return MachineFault(
        f"{piece} is a no-match in this process, but its repetition in a fresh one {how}: {last}",
        cause="memory ran out, someone killed it, or the machine is faulty",
        next_step=NEXT,
    )
