"""Tests of mcinfer/errors.py."""

from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import printable, quotable, shortened


@given(st.text(st.characters()))  # surrogates too, which files' names may have
def test_text_of_any_characters_is_one_line_that_commands_no_terminal(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)


def test_what_can_be_seen_stays_and_what_cannot_does_not() -> None:
    assert printable("größe [1]") == "größe [1]"
    assert printable("\x1b[31mred\n\u202eleft\udcff") == "?[31mred??left?"
    assert printable(None) == "None"


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shortened("short") == "short"
    text = shortened("begin" + "x" * 10_000_000 + "end")
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "[9996008 characters left out]" in text
    assert len(text) < 5000


def test_cause_that_is_too_long_is_left_out() -> None:
    short, long = ValueError("no"), ValueError("no" * 10_000)
    assert quotable(short) is short
    assert quotable(long) is None
