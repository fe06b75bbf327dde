"""The lock of what callers' threads change, which a signal's handler may interrupt, or enter again."""

import threading

_RLock = type(threading.RLock())  # `threading.RLock` is a function for type checkers


class Lock(_RLock):  # type: ignore[misc, valid-type]
    """A `threading.RLock` that no exception of a signal's handler leaves held.

    On CPython 3.14 ``with`` lets handlers run after it has taken a lock, and before it is sure to release it
    (python/cpython#148874, mended in 3.15): one that raises there, as Ctrl-C does, leaves a plain lock held
    for ever. The ``__exit__`` stays that of C: a handler could run at the begin of one in Python.
    """

    def __enter__(self) -> None:
        try:
            self.acquire()
        except BaseException:
            # Where the thread held it before, nothing has raised but a handler after it was taken again.
            if self._is_owned():
                self.release()
            raise
