"""mcinfer's exceptions as programs of MindSpore Lite expect them: every failure is a RuntimeError.

What is no RuntimeError in mcinfer's own tree (a bad input is a ValueError, a time-out a TimeoutError) is
both here, so that ``except RuntimeError`` and ``except mcinfer.PredictTimeoutError`` each do.
"""

from mcinfer.errors import (
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    PredictTimeoutError,
    WeightAccessError,
)


class InvalidRunError(InvalidInputError, RuntimeError):
    """Inputs do not fit the model."""


class RunTimeoutError(PredictTimeoutError, RuntimeError):
    """The time for a request is over."""


class MissingRuntimeError(MissingDependencyError, RuntimeError):
    """The package of an engine is not installed."""


class WeightRefusedError(WeightAccessError, RuntimeError):
    """Shared weights cannot be had."""


class UnclassifiedError(McinferError, RuntimeError):
    """What has no class of its own in mcinfer either."""


_BOTH: dict[type[McinferError], type[McinferError]] = {
    InvalidInputError: InvalidRunError,
    PredictTimeoutError: RunTimeoutError,
    MissingDependencyError: MissingRuntimeError,
    WeightAccessError: WeightRefusedError,
}


def failure(what: str, exc: BaseException) -> Exception:
    """The error to raise for another one: ``{what} failed! Error is {exc}``.

    Args:
        what: ``predict``, ``build_from_file``, …
        exc: What happened. It is to be the cause of the error (``raise … from exc``).

    Returns:
        A RuntimeError that is of the same class of `mcinfer.errors` as well, where `exc` is of one.
    """
    text = f"{what} failed! Error is {exc}"
    if not isinstance(exc, McinferError):
        return RuntimeError(text)
    kind = _BOTH.get(type(exc), type(exc))
    return kind(text) if issubclass(kind, RuntimeError) else UnclassifiedError(text)
