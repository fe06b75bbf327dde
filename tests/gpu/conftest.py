"""The cards that the tests in this folder run on: real ones where there are any, else emulated ones.

`make test-gpu` runs them on a machine with a card, by the file on_card.ini beside this one; there a card that
cannot be used is an error. `make test` runs the same tests on the emulation of a driver in the folder
`emulated`, and skips the modules test_on_card and test_memory, which are about the real driver.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from mcinfer import Master
from mcinfer.cards.nvidia_smi import gpus
from mcinfer.examples import encoder
from tests.emulated_cards import emulated_cards
from tests.gpu.cards import IMAGES, Cards, why_no_card

HERE = Path(__file__).resolve().parent
OWN_FILE = HERE / "on_card.ini"


@pytest.fixture(scope="package")
def cards(pytestconfig: pytest.Config) -> Iterator[Cards]:
    """The cards to test with; see above."""
    why = why_no_card()
    if not why:
        yield Cards(real=True, count=len(gpus()))
        return
    if pytestconfig.inipath == OWN_FILE:
        pytest.exit(f"no card can be used: {why}", returncode=1)
    with emulated_cards():
        yield Cards(real=False, count=2)


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


@pytest.fixture(scope="package")
def expected() -> NDArray[np.float32]:
    """What one session on the CPU says of `IMAGES`."""
    session = ort.InferenceSession(encoder(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["embedding"], {"image": IMAGES})[0]
    return result


@pytest.fixture(scope="package")
def pool(cards: Cards) -> Iterator[Master]:
    """Two workers on the first card, and one on the second if there is one."""
    with cards.pool(encoder(), "cuda:0", "cuda:0", *["cuda:1"][: cards.count - 1]) as master:
        yield master
