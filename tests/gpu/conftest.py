"""The cards that the tests in this folder run on: real ones where there are any, else emulated ones.

`make test-gpu` runs them on a machine with a card, by the file on_card.ini beside this one; there a card that
cannot be used is an error. `make test` runs the same tests on the emulation of a driver in the folder
`emulated`, and skips those that ask for the fixture `card`: what they show, an emulation cannot.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcinfer.machine import gpus
from tests.gpu.cards import Cards

HERE = Path(__file__).resolve().parent
EMULATED = HERE / "emulated"
OWN_FILE = HERE / "on_card.ini"


def _why_no_card() -> str:
    """Why no card can be used; empty if one can."""
    try:
        gpus()
    except OSError as exc:
        return str(exc)
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"onnxruntime {onnxruntime.__version__} has no CUDAExecutionProvider"
    try:
        import cupy  # noqa: F401
        from cuda.bindings import driver  # noqa: F401
    except ImportError as exc:
        return str(exc)
    return ""


@pytest.fixture(scope="package")
def cards(pytestconfig: pytest.Config) -> Iterator[Cards]:
    """The cards to test with; see above."""
    why = _why_no_card()
    if not why:
        yield Cards(real=True, count=len(gpus()))
        return
    if pytestconfig.inipath == OWN_FILE:
        pytest.exit(f"no card can be used: {why}", returncode=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EMULATED)
        patch.setenv("MCINFER_EMULATED_CARDS", "2")
        patch.setenv(
            "MCINFER_EMULATED_LEDGER", f"tests{os.getpid()}"
        )  # not those of other test runs
        yield Cards(real=False, count=2)


@pytest.fixture
def card(cards: Cards) -> Cards:
    """The cards, if they are real; else the test is skipped."""
    if not cards.real:
        pytest.skip("no card: `make test-gpu` runs this where there is one")
    return cards


@pytest.fixture(scope="package", autouse=True)
def _own_folders(pytestconfig: pytest.Config) -> Iterator[None]:
    """The model cache and runtime folders of this test run alone, where no other conftest.py sees to it."""
    if pytestconfig.inipath != OWN_FILE:
        yield
        return
    path = Path(tempfile.mkdtemp(prefix="mcg-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        patch.setenv("MCINFER_CACHE", str(path / "cache"))
        yield
    shutil.rmtree(path)
