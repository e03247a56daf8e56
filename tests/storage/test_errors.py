"""Messages repeat what strangers wrote: it must not steer a terminal."""

import pytest

from storage.errors import Divergence, InputFault, printable


def test_control_characters_and_lone_surrogates_are_escaped() -> None:
    assert printable("a\x1b[31mb\x07\r\t\x9b\ud800\u202e") == r"a\x1b[31mb\x07\r\t\x9b\ud800\u202e"
    assert printable("größer → 7 ✓\nnext line") == "größer → 7 ✓\nnext line"


@pytest.mark.parametrize("kind", [InputFault, Divergence])
def test_every_error_is_printable(kind: type[InputFault | Divergence]) -> None:
    error = kind("found \x1b[2J", cause="\ud800", next_step="\x00")
    assert error.message == r"found \x1b[2J"
    assert str(error) == "found \\x1b[2J\n  likely cause: \\ud800\n  next: \\x00"
