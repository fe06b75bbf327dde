"""Tests of mcinfer/printable.py."""

from hypothesis import given
from hypothesis import strategies as st

from mcinfer.printable import printable


@given(st.text(st.characters()))  # surrogates too, which files' names may have
def test_text_of_any_characters_is_one_line_that_commands_no_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)


def test_what_can_be_seen_stays_and_what_cannot_does_not() -> None:
    assert printable("größe [1]") == "größe [1]"
    assert printable("\x1b[31mred\n\u202eleft\udcff") == "?[31mred??left?"
    assert printable(None) == "None"
