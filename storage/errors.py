"""Every error that a person may see, each with the exit code that the command line returns.

0 is success, 1 any failure without a code of its own, 2 wrong usage; 10 to 13 are the verdicts of an audit
(`storage/audit/verdict.py`), and the same codes serve wherever the same thing is found outside an audit.
"""

import re


def printable(text: str) -> str:
    """The text with everything escaped that could steer a terminal or that has no encoding; line ends stay.

    What a stranger wrote into a run, or named a file, is repeated in messages.
    """
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_secrets(text: str) -> str:
    """The text, of addresses in it neither a user with a password nor what follows their path."""
    hidden = re.sub(r"://[^\s'\"]*@", "://…@", text)
    return re.sub(r"(://[^\s'\"?#]*)[?#][^\s'\"]*", r"\1?…", hidden)


class VerbatimError(Exception):
    """What is wrong, with both values; its likely cause; the next command."""

    exit_code = 1

    def __init__(self, message: str, *, cause: str = "", next_step: str = "") -> None:
        self.message = printable(message)
        self.cause = cause
        self.next_step = next_step
        lines = [message]
        if cause:
            lines.append(f"  likely cause: {cause}")
        if next_step:
            lines.append(f"  next: {next_step}")
        super().__init__(printable("\n".join(lines)))


class UsageError(VerbatimError):
    """The caller asked for something that has no meaning."""

    exit_code = 2


class StorageError(VerbatimError):
    """The store could not do what was asked: disk full, no permission, a broken file system."""


class NoPermission(StorageError):
    """This user may not read, list or write one file or folder of a store; the others may be open to it."""


class Halted(VerbatimError):
    """The spike protocol stopped the run: going on would train on a diverging model."""


class Divergence(VerbatimError):
    """A recomputed step or state differs from the recorded one. fields: of the ledger entry of `step`, where known."""

    exit_code = 10

    def __init__(
        self,
        message: str,
        *,
        cause: str = "",
        next_step: str = "",
        step: int | None = None,
        fields: tuple[str, ...] = (),
        tensors: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, cause=cause, next_step=next_step)
        self.step, self.fields, self.tensors = step, fields, tensors


class InputFault(VerbatimError):
    """Something read has another digest, size or form than was promised. key: the object at fault, where it is said."""

    exit_code = 11

    def __init__(self, message: str, *, cause: str = "", next_step: str = "", key: str = "") -> None:
        super().__init__(message, cause=cause, next_step=next_step)
        self.key = key


class MissingObject(InputFault):
    """An object that must be there is not."""


class LedgerFault(InputFault):
    """The ledger is not one unbroken chain: an entry is changed, missing, double, out of order or cut off."""


class WindowFault(InputFault):
    """A window of the stream is not the one that the mix root covers."""


class CheckpointFault(InputFault):
    """A checkpoint does not hold the state that the ledger names."""


class CertificateFault(InputFault):
    """A certificate is damaged, forged, or speaks of something else."""


class Equivocation(InputFault):
    """The run's trainer signed two things of which only one can be true."""


class MachineFault(VerbatimError):
    """This machine disagrees with itself or with the conformance vectors."""

    exit_code = 12


class Refused(VerbatimError):
    """There is nothing to compare with, or what was asked would overwrite something."""

    exit_code = 13


class RankLost(VerbatimError):
    """Another process of the segment ended before its work was done. Nothing is wrong with what was saved."""
