"""What errors and warnings of the Python interface advise, in the words of ``mcinfer run``."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mcinfer.errors import McinferError

_MASTER = "mcinfer.master"

_WORDS = (
    # A name's repr is quoted as a shell wants it.
    (
        re.compile(r"batch_axes=\{(.+?): 0\} \(cut\) or \{\1: None\}"),
        r"--batch-axis \1=0 (cut) or \1=none",
    ),
    (re.compile(r"batch_axes\[(.+?)\]: (.*)expected None"), r"--batch-axis \1: \2expected none"),
    (re.compile(r"batch_axes"), "--batch-axis"),
    (
        re.compile(r"submit\(\) runs the batch in one piece"),
        "--devices 1 and a --batch of all rows have it run in one piece",
    ),
)


def in_options(text: str) -> str:
    """A message with options in the place of arguments and calls."""
    for said, option in _WORDS:
        text = said.sub(option, text)
    return text


@contextmanager
def speaking_of_options(*, warn: bool) -> Iterator[None]:
    """Have errors and the master's warnings speak of options.

    Args:
        warn: Whether there are to be any of the master's warnings.
    """

    def reword(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_options(record.getMessage()), ()
        return warn

    log = logging.getLogger(_MASTER)
    log.addFilter(reword)
    try:
        yield
    except McinferError as exc:
        text = in_options(str(exc))
        if text == str(exc):
            raise
        raise type(exc)(text) from exc
    finally:
        log.removeFilter(reword)
