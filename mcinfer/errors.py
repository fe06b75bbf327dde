"""The exceptions of mcinfer.

::

    McinferError
    ├── InvalidInputError (ValueError)        what you gave does not fit; nothing was sent
    ├── EngineError (RuntimeError)            the inference runtime said no
    │   ├── BuildError                        a model could not be made ready on a device
    │   │   └── ModelNotFoundError (FileNotFoundError)  there is no such file
    │   └── PredictError                      a run failed; the worker lives on
    ├── WorkerDiedError (RuntimeError)        a worker process ended by itself or was killed
    ├── PredictTimeoutError (TimeoutError)    a deadline passed
    ├── ReadyTimeoutError (TimeoutError)      the workers were not all ready in time
    ├── QueueFullError (RuntimeError)         a limit on queued requests or memory was reached
    ├── ClosedError (RuntimeError)            you closed it, or never started it
    ├── ProtocolError (RuntimeError)          a message that should not be: a bug or an intruder
    ├── WeightAccessError (PermissionError)   shared weights were refused to a process
    └── MissingDependencyError (ImportError)  an optional package is missing; says which
"""


class McinferError(Exception):
    """Base of every exception that mcinfer raises on purpose."""


class InvalidInputError(McinferError, ValueError):
    """An argument does not fit: it names the argument, what came and what was expected."""


class EngineError(McinferError, RuntimeError):
    """The inference runtime refused or failed; the text holds the runtime's own words."""


class BuildError(EngineError):
    """A model could not be loaded on a device; names every worker that failed, and why."""


class ModelNotFoundError(BuildError, FileNotFoundError):
    """There is no file at the model's path; no worker was started."""


class PredictError(EngineError):
    """A run raised inside the runtime. Only this request fails; the worker lives on."""


class WorkerDiedError(McinferError, RuntimeError):
    """Workers died and the request could not be given to another one, or no worker serves for now.

    Names the index, device, pid and exit code or signal of each worker that died.
    """


class PredictTimeoutError(McinferError, TimeoutError):
    """The request's deadline passed before its answer came."""


class ReadyTimeoutError(McinferError, TimeoutError):
    """Not every worker was ready in time; the text says what each of the others was doing."""


class QueueFullError(McinferError, RuntimeError):
    """Too many requests are queued, or the shared memory for tensors is all in use."""


class ClosedError(McinferError, RuntimeError):
    """The master is closed, was never started, or belongs to the process that forked this one."""


class ProtocolError(McinferError, RuntimeError):
    """A message was malformed or came in a state that does not allow it; nothing was changed."""


class WeightAccessError(McinferError, PermissionError):
    """A process asked for shared weights that it was not granted."""


class MissingDependencyError(McinferError, ImportError):
    """An optional package is needed and not installed; the text says what to install."""
