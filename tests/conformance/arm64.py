"""`make arm64`: the CPU backend on a second architecture, emulated, against this machine's own.

Prepares runs/arm64 if it must, then prints the table of `make conformance` for the rows below. Exit code 1 on any
difference, 2 where this machine cannot emulate.
"""

import sys

from tests.conformance import emulation
from tests.conformance.table import Row, show

ROWS = (
    Row("everything this machine has"),
    Row("arm64, emulated", emulated=True),
    Row("arm64, emulated, one thread", emulated=True, threads=1),
    Row("arm64, torch operations alone", emulated=True, backend="generic:cpu"),
)


def main() -> int:
    """Prepare, run the rows, return the exit code."""
    try:
        emulation.prepare()
    except emulation.NotPossible as error:
        print(error, file=sys.stderr)
        return 2
    return show(ROWS)


if __name__ == "__main__":
    import flows  # noqa: F401  (importing it applies the environment)

    sys.exit(main())
