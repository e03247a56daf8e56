"""The reader's file of named keys: whose certificates and whose witness count for whoever reads a report.

    <64 hex digits> <name>    one key a line; # begins a comment

Keys are not people: whoever holds two keys can sign twice. Only a reader can say which keys belong to different people,
so two keys under one name count as one, and a key without a name counts for nothing. Two ways to write one name, with
other spaces or other code points for the same letters, are one name.
"""

import re
import unicodedata
from pathlib import Path

from storage.errors import UsageError
from storage.named import read_file

MAX_FILE = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64}) (\S.*)")

Named = dict[str, str]  # public key → name


def load_named(path: Path) -> Named:
    """The keys of the file with their names. UsageError for a line that is none, or a key under two names."""
    try:
        text = read_file(path, MAX_FILE).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(
            f"the file of named keys {path} cannot be read: {reason}",
            next_step="write lines of 64 hex digits, a space, and a name; verbatim verify prints a certificate's key",
        ) from None
    named: Named = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(" ".join(unicodedata.normalize("NFKC", content).split()))
        if not match or not match[2].isprintable() or named.setdefault(match[1], match[2]) != match[2]:
            raise UsageError(
                f"{path}, line {number}: {content[:100]!r} is no key with a name, or its key has another name above",
                next_step="write lines of 64 hex digits, a space, and a name",
            )
    return named
