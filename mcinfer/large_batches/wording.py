"""What errors and warnings of the Python interface advise, in the words of ``mcinfer run``."""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mcinfer.errors import McinferError

_MASTER = "mcinfer.master"

_WORDS = (
    # A name's repr is quoted as a shell wants it.
    (re.compile(r"output_axes=\{(.+?): 0\}, or None where"), r"--output-axis \1=0, or none where"),
    (re.compile(r"batch_axes\[(.+?)\]: (.*)expected None"), r"--batch-axis \1: \2expected none"),
    (re.compile(r"output_axes\[(.+?)\]: (.*)expected None"), r"--output-axis \1: \2expected none"),
    (re.compile(r"output_axes says None"), "--output-axis says none"),
    (re.compile(r"batch_axes"), "--batch-axis"),
    (re.compile(r"output_axes"), "--output-axis"),
)


def in_options(text: str) -> str:
    """A message with options in the place of arguments."""
    for said, option in _WORDS:
        text = said.sub(option, text)
    return text


def say(text: str) -> None:
    """Write a line to standard error, at once."""
    print(f"mcinfer: {in_options(text)}", file=sys.stderr, flush=True)


@contextmanager
def speaking_of_options() -> Iterator[None]:
    """Have errors and the master's warnings speak of options."""

    def reword(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_options(record.getMessage()), ()
        return True

    with _filtered(reword):
        try:
            yield
        except McinferError as exc:
            text = in_options(str(exc))
            if text == str(exc):
                raise
            raise type(exc)(text) from exc


@contextmanager
def silent_about_splits() -> Iterator[None]:
    """Have the master warn of nothing that it finds out of how a batch is split."""
    with _filtered(lambda record: record.module != "splitting"):
        yield


@contextmanager
def _filtered(keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    log = logging.getLogger(_MASTER)
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
