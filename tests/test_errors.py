"""Tests of mcinfer/errors.py."""

from hypothesis import given
from hypothesis import strategies as st

from mcinfer.errors import (
    printable,
    quotable,
    say_once,
    shortened,
)


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
    assert (text[:5], text[-3:], len(text) < 5000) == ("begin", "end", True)


def test_cause_that_is_too_long_is_left_out() -> None:
    short, long = ValueError("no"), ValueError("no" * 10_000)
    assert quotable(short) is short
    assert quotable(long) is None


def test_what_several_workers_say_is_in_the_text_once_with_their_numbers() -> None:
    def name(index: int, pid: int = 100) -> str:
        return f"worker {index} (cpu:{index}, pid {pid + index})"

    assert say_once([]) == ""
    assert say_once([f"{name(3)}: no memory"]) == f"{name(3)}: no memory"
    same = [f"{name(i)}: no memory" for i in (0, 1, 2, 4, 6, 7)]
    assert say_once(same) == "workers 0 to 2, 4, 6 and 7: no memory"
    assert say_once([*same[:2], f"{name(5)}: no file"]) == (
        f"workers 0 and 1: no memory; {name(5)}: no file"
    )
    deaths = [f"{name(i)} killed by SIGKILL; {name(i, 200)} exited with status 1" for i in range(9)]
    assert say_once(deaths) == "each of workers 0 to 8 killed by SIGKILL; exited with status 1"
    # One that speaks of another worker is not mistaken for one that speaks of itself.
    others = [f"{name(i)} shares memory with worker {i + 1} (cuda:0)" for i in range(2)]
    assert say_once(others) == "; ".join(others)
    groups = [f"group {i} of 2 ranks (cpu:{i}): no file" for i in range(2)]
    assert say_once([*groups, "2 requests are left"]) == (
        "groups 0 and 1 of 2 ranks: no file; 2 requests are left"
    )
