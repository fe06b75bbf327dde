"""Locks of what callers' threads change, which a signal's handler may interrupt.

On CPython 3.14 ``with`` lets handlers run after it has taken a lock, and before it is sure to release it
(python/cpython#148874, mended in 3.15): one that raises there, as Ctrl-C does, leaves a plain lock held for
ever. So these take it by an attribute, after which no handler runs, nor at the end of a function. Their
``__exit__`` stays that of C: a handler could run at the begin of one in Python.
"""

import threading

_RLock = type(threading.RLock())  # `threading.RLock` is a function for type checkers


class Lock(_RLock):  # type: ignore[misc, valid-type]
    """A `threading.RLock` that no exception of a signal's handler leaves held."""

    _taken = property(_RLock.acquire)

    def __enter__(self) -> None:
        self._taken  # noqa: B018 it has an effect


class Turn(Lock):
    """The same for what its holder must not enter again: it gets a RuntimeError, in place of a wait."""

    def __enter__(self) -> None:
        if self._is_owned():
            raise RuntimeError("a signal's handler, or a finalizer, called what it has interrupted")
        self._taken  # noqa: B018
