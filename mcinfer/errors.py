"""The exceptions of mcinfer.

::

    McinferError
    ├── InvalidInputError (ValueError)        an argument does not fit; nothing was sent
    ├── EngineError (RuntimeError)            the inference runtime refused or failed
    │   ├── BuildError                        a model could not be loaded on a device
    │   │   └── ModelNotFoundError (FileNotFoundError)  the model's file does not exist
    │   ├── PredictError                      a run failed; the worker continues
    │   └── CardError                         a call of the CUDA driver failed
    │       ├── CardMemoryError (MemoryError) a card has no memory left
    │       └── CardLostError                 this process can use the card no more
    ├── WorkerDiedError (RuntimeError)        a worker process ended by itself or was killed
    │   └── RankDiedError                     a rank of a group did
    ├── PredictTimeoutError (TimeoutError)    a deadline passed
    ├── CollectiveTimeoutError (TimeoutError) a rank did not take part in a collective in time
    ├── ReadyTimeoutError (TimeoutError)      the workers were not all ready in time
    ├── QueueFullError (RuntimeError)         a limit on queued requests or memory was reached
    │   └── MemoryFullError                   that on memory for tensors was
    ├── ClosedError (RuntimeError)            you closed it, or never started it
    ├── ProtocolError (RuntimeError)          a message that is not allowed: a bug or an intruder
    ├── WeightAccessError (PermissionError)   a process has no access to shared weights
    └── MissingDependencyError (ImportError)  an optional package is missing; says which
"""

import collections.abc
import re
from typing import Literal, Self, get_args

_ABOUT_ONE = re.compile(
    r"(worker|group) (\d+)((?: of \d+ ranks)?)((?: \([^()]*\))?)(:? )(.*)", re.DOTALL
)
"""A sentence about a worker: what it is, its number, ranks, device and pid, and the rest."""

Refusal = Literal["queue_full", "memory", "no_worker", "too_large", "invalid"]
REFUSALS: tuple[Refusal, ...] = get_args(Refusal)
"""Why requests are not accepted: see `mcinfer.Statistics`."""


class McinferError(Exception):
    """Base of every exception that mcinfer raises on purpose.

    Attributes:
        refusal: If it refuses a request, the reason by which that is to be counted (`mcinfer.statistics`);
            None once it is counted, and for an error that answers a request.
    """

    refusal: Refusal | None = None

    def refusing(self, reason: Refusal | None) -> Self:
        """This error, with another reason than that of its class."""
        self.refusal = reason
        return self


class InvalidInputError(McinferError, ValueError):
    """An argument does not fit: names the argument, what came and what was expected.

    Attributes:
        by_runtime: Whether the runtime refused the inputs in a run: the text is its own, and may name files.
    """

    by_runtime = False
    refusal: Refusal | None = "invalid"


def refused_by_runtime(text: str) -> InvalidInputError:
    """The error for inputs that the runtime refuses in a run, with the runtime's text."""
    error = InvalidInputError(text)
    error.by_runtime = True
    return error


def is_refusal(caught: object) -> bool:
    """Whether pytest has caught an `InvalidInputError`: ``__tracebackhide__`` of the modules on its way.

    pytest then shows the line that gave the input, and none of these modules' (``--full-trace`` shows all).
    """
    return isinstance(getattr(caught, "value", None), InvalidInputError)


class EngineError(McinferError, RuntimeError):
    """The inference runtime refused or failed; the text includes the runtime's message."""


class BuildError(EngineError):
    """A model could not be loaded on a device; names every worker that failed, and why."""


class ModelNotFoundError(BuildError, FileNotFoundError):
    """The model's path has no file; no worker was started."""


class PredictError(EngineError):
    """A run raised inside the runtime. Only this request fails; the worker continues."""


class CardError(EngineError):
    """A call of the CUDA driver failed; names the card, the call, and the driver's result.

    Attributes:
        status: The name of the driver's result, such as ``"CUDA_ERROR_INVALID_VALUE"``.
    """

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status


class CardMemoryError(CardError, MemoryError):
    """A card has no memory left; names the bytes that were asked for, and those that are free."""


class CardLostError(CardError):
    """The driver gave up this process's context on a card: only a new process can use the card again."""


class WorkerDiedError(McinferError, RuntimeError):
    """Workers died and no other one could run the request, or no worker serves at present.

    Names the index, device, pid and exit code or signal of each worker that died.
    """


class RankDiedError(WorkerDiedError):
    """A rank of a group died. Every other rank gets this error; names the rank, its pid and the signal."""


class PredictTimeoutError(McinferError, TimeoutError):
    """The request's deadline passed before its answer came."""


class CollectiveTimeoutError(McinferError, TimeoutError):
    """A rank did not take part in a collective in time; names the ranks that are missing."""


class ReadyTimeoutError(McinferError, TimeoutError):
    """Not every worker was ready in time; the text gives the state of each of the others."""


class QueueFullError(McinferError, RuntimeError):
    """Too many requests are queued (`Limits.queue`, `Limits.queue_bytes`), or it is a `MemoryFullError`."""

    refusal: Refusal | None = "queue_full"


class MemoryFullError(QueueFullError):
    """All shared memory for tensors that `Limits.memory_bytes` allows, or a card's, is in use."""

    refusal: Refusal | None = "memory"


class ClosedError(McinferError, RuntimeError):
    """The master is closed, was never started, or belongs to the process that forked this one."""


class ProtocolError(McinferError, RuntimeError):
    """A message was malformed, or its state does not allow it; nothing was changed."""


class WeightAccessError(McinferError, PermissionError):
    """A process asked for shared weights without a grant."""


class MissingDependencyError(McinferError, ImportError):
    """An optional package is needed and not installed; the text says what to install."""


# Texts of errors.

_MAX_CHARACTERS = 4000
_END_CHARACTERS = 1000


def printable(text: object) -> str:
    """One line of the text; a question mark replaces each unprintable character, such as terminal escapes."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def shortened(text: str) -> str:
    """The text, without its middle if it is too long to read."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    first = _MAX_CHARACTERS - _END_CHARACTERS
    left_out = len(text) - _MAX_CHARACTERS
    return f"{text[:first]} [{left_out} characters left out] {text[-_END_CHARACTERS:]}"


def quotable(exc: Exception) -> Exception | None:
    """The exception as a cause for another one; None if its text is too long for a traceback."""
    return exc if len(str(exc)) <= _MAX_CHARACTERS else None


def say_once(sentences: collections.abc.Iterable[str]) -> str:
    """Sentences about workers as one text: what several workers say is in it once, with all their numbers."""
    said: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for sentence in sentences:
        found = _ABOUT_ONE.fullmatch(sentence)
        if found is None:
            said.setdefault((sentence,), []).append((0, sentence))
            continue
        kind, number, ranks, _, joint, rest = found.groups()
        # What has the worker's own name in it again, as in the story of a second death, is the same, too.
        rest = re.sub(rf"{kind} {number}{ranks}(?: \([^()]*\))?:? ", "", rest)
        said.setdefault((kind, ranks, joint, rest), []).append((int(number), sentence))
    texts = []
    for key, each in said.items():
        if len(each) == 1 or len(key) == 1:
            texts += [sentence for _, sentence in each]
            continue
        kind, ranks, joint, rest = key
        each_of = "each of " if joint == " " else ""
        texts.append(f"{each_of}{kind}s {_numbers([n for n, _ in each])}{ranks}{joint}{rest}")
    return "; ".join(texts)


def spans(numbers: collections.abc.Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last of each row of consecutive numbers, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        begun = bool(found) and found[-1][1] == number - 1
        found.append((found.pop()[0] if begun else number, number))
    return found


def _numbers(numbers: list[int]) -> str:
    """Numbers in words: ``0 to 3, 5 and 7``."""
    texts: list[str] = []
    for first, last in spans(numbers):
        few = map(str, range(first, last + 1))
        texts += few if last < first + 2 else [f"{first} to {last}"]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
