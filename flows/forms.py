"""Types of the flows' parameters: what a form of the UI accepts. What each means stands in the flows' docstrings, which
the forms show.

Prefect keeps every parameter of every run in plain text, so none may hold a secret. A form is checked before its run is
made, by the schema; whatever else starts a run, by the flow. Credentials belong into the worker's environment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from storage.errors import UsageError, without_secrets

LONGEST = 1024  # characters of a name or an address
MOST = 16  # further copies
# Of an address the same as what `without_secrets` would hide: a user before the host, and whatever follows the path.
# The second alternative is there to be read: a form that refuses a value shows this pattern as the reason.
OPEN = r"""^(?!.*://[^\s'"]*[@?#])|^An address must hold no user, password or query, since Prefect would keep it\.$"""


def _open(address: str) -> str:
    """UsageError where an address may hold a secret; it is not repeated."""
    if without_secrets(address) != address:
        raise UsageError(
            f"{without_secrets(address)} may hold a secret, which Prefect would keep and show to everyone",
            cause="a user before the host, or something behind the path, as in a signed address",
            next_step="give the address alone; the worker takes credentials from its own environment (AWS_PROFILE, …)",
        )
    return address


# A folder, or an address at file://, s3:// or https://; empty where there is a default.
Place = Annotated[str, Field(max_length=LONGEST, json_schema_extra={"pattern": OPEN}), AfterValidator(_open)]
Recipe = Annotated[Place, Field(min_length=1)]
Address = Annotated[Place, Field(min_length=1)]
Addresses = Annotated[tuple[Address, ...], Field(max_length=MOST)]
Backend = Literal["cpu", "nvidia", "reference"]
Step = Annotated[int | None, Field(ge=0, lt=1 << 31)]
Count = Annotated[int, Field(ge=1, le=1000)]
Audits = Annotated[int, Field(ge=0, le=1000)]
