"""NVIDIA cards where there are none: the driver and CuPy of tests/gpu/emulated, also for child processes."""

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mcinfer.cards.cuda import Card
from mcinfer.errors import CardLostError

EMULATED = Path(__file__).parent / "gpu" / "emulated"
_PACKAGES = ("cuda", "cupy")
_NUMBERS = count()


@contextmanager
def emulated_cards(**variables: str) -> Iterator[Any]:
    """Two cards with memory of their own, as long as this lasts; gives the emulated CuPy.

    Args:
        variables: Others of the emulated driver, such as ``BYTES="4194304"``, and ``CARD_MEMORY``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Card, "_opened", {})
        for name in _loaded():
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(EMULATED)
        # Another one each time, since a test before may have left memory that is not collected yet.
        ledger = f"tests{os.getpid()}x{next(_NUMBERS)}"
        for name, value in {"CARDS": "2", "LEDGER": ledger, **variables}.items():
            prefix = "MCINFER_" if name == "CARD_MEMORY" else "MCINFER_EMULATED_"
            patch.setenv(prefix + name, value)
        cupy = import_module("cupy")
        assert Path(str(cupy.__file__)).is_relative_to(EMULATED)
        yield cupy
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        for card in Card._opened.values():
            with suppress(CardLostError):  # as a test wanted it
                card.reclaim()
        for name in _loaded():
            del sys.modules[name]


@contextmanager
def busy(stream: Any) -> Iterator[Callable[[], None]]:
    """Work on a stream of CuPy's that ends with this, or once the function that is given is called."""
    gate = threading.Event()
    stream.launch_host_func(lambda _: gate.wait(60), None)
    try:
        yield gate.set
    finally:
        gate.set()


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in _PACKAGES]
