"""Records: small canonical JSON documents of a fixed form. Everything read from a store is treated as hostile.

A record is frozen, knows exactly its fields, and has one byte form; `parse` refuses any other bytes, so that the
digest of the bytes means the record.
"""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kernels import canonical
from storage.errors import InputFault


def _finite(text: str) -> str:
    if int(text, 16) & 0x7F800000 == 0x7F800000:
        raise ValueError("not the bits of a finite number")
    return text


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
# A finite float32, as the hex digits of its big-endian bits; what is not finite is recorded as null.
Bits = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$"), AfterValidator(_finite)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Text = Annotated[str, Field(max_length=4096)]


class Record(BaseModel):
    """A frozen document with one canonical byte form; every field counts, no other field is allowed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def document(self) -> dict[str, Any]:
        """The plain value that canonical JSON holds."""
        return self.model_dump(mode="json")

    def canonical(self) -> bytes:
        """The record's bytes."""
        return canonical.dumps(self.document())

    @classmethod
    def parse(cls, data: bytes, where: str, fault: type[InputFault] = InputFault) -> Self:
        """The record of `data`; raises `fault`, naming `where` and the field, unless they are exactly canonical()."""
        try:
            record = cls.model_validate(canonical.loads(data))
        except canonical.NotCanonical as error:
            raise fault(f"{where}: {str(error)[:300]}", cause="the object was damaged or edited") from None
        except ValidationError as error:
            raise fault(f"{where}: {first(error)}", cause="the object was damaged, edited or is another's") from None
        try:
            same = record.canonical() == data
        except ValueError as error:  # Pydantic writes less depth than it reads
            raise fault(f"{where}: {str(error)[:300]}", cause="the object was made to be unreadable") from None
        if not same:
            raise fault(f"{where}: not the canonical form of its content", cause="a field is missing or was rewritten")
        return record


def first(error: ValidationError) -> str:
    """The first thing that is wrong, in one line of bounded length."""
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])[:200] or "document"
    return f"{field}: {fault['msg']}, found {str(fault['input'])[:80]!r}"
