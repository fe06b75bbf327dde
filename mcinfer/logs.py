"""Records of the log: which pool they are about, and how mcinfer itself prints them.

Beside its text a record may have *fields*, by name: what programs look for, such as the model. They are the
record's attribute ``fields``, and stand by themselves in lines of JSON.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mcinfer.errors import printable

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Of records that mcinfer itself prints: the command line's, and those of workers."""

_SUBJECT: ContextVar[str] = ContextVar("mcinfer.logs", default="")


def fields_of(label: str) -> dict[str, Any]:
    """The fields that say which model a record is about; its label is ``MODEL`` or ``MODEL/VERSION``."""
    parts = zip(("model", "version"), label.split("/", 1), strict=False)
    return {name: value for name, value in parts if value}


@contextmanager
def about(label: str) -> Iterator[None]:
    """What this context logs is about this model, unless a record says that itself."""
    token = _SUBJECT.set(label)
    try:
        yield
    finally:
        _SUBJECT.reset(token)


class PoolLog:
    """The records about one pool: they begin with its name, and its label is among their fields.

    Attributes:
        label: The model, for people.
    """

    def __init__(self, label: str, devices: Iterable[str]) -> None:
        different = [*dict.fromkeys(devices)]  # in words that fit a line
        few = different if len(different) <= 4 else [*different[:2], "…", different[-1]]
        self.label = label
        self._name, self._extra = f"{label} on {', '.join(few)}", {"fields": fields_of(label)}
        self._log = logging.getLogger("mcinfer.master")

    def log(
        self,
        level: int,
        text: str,
        *values: object,
        failure: BaseException | None = None,
        stacklevel: int = 1,
    ) -> None:
        text, values = f"%s: {text}", (self._name, *values)
        how: Any = {"exc_info": failure, "extra": self._extra, "stacklevel": stacklevel + 1}
        self._log.log(level, text, *values, **how)

    def warning(self, text: str, *values: object) -> None:
        self.log(logging.WARNING, text, *values, stacklevel=2)


class TextFormatter(logging.Formatter):
    """Text for a record: its first line begins at the margin, and no other one does.

    So no text of a client's passes for a record, and none reaches a terminal as an escape.
    """

    def __init__(self, mark: str = "") -> None:
        """Begin each record with `mark`."""
        super().__init__(mark.replace("%", "%%") + TEXT)

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, super().format(record).splitlines()))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        if (label := _SUBJECT.get()) and not hasattr(record, "fields"):
            record.message = f"{label}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """A line of JSON for a record: its time in UTC (ISO 8601), level, logger, message, fields, exception."""

    converter = staticmethod(time.gmtime)
    default_time_format, default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"

    def __init__(self, fields: Mapping[str, Any] | None = None) -> None:
        """Give each record these fields."""
        super().__init__()
        self._fields = fields or {}

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", fields_of(_SUBJECT.get()))
        entry = {**own, **self._fields, **fields, **own}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def write_json() -> None:
    """Print records that no handler takes as JSON from now on, in this process and its workers."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(JsonFormatter())


def writes_json() -> bool:
    """Whether `write_json` was called."""
    return isinstance(getattr(logging.lastResort, "formatter", None), JsonFormatter)
