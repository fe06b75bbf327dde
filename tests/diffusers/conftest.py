"""Small pipelines, their exported models, and a check that no worker outlives a test.

These tests need PyTorch and diffusers: `make test-diffusers`.
"""

import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # of a shell that runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that are not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A pipeline, the folder with its exported parts, and by part the model in it."""

    pipe: Any
    folder: Path
    models: dict[str, Path]


PARTS = {
    "sd": ("unet", "vae_decoder", "text_encoder"),
    "sdxl": ("unet", "text_encoder_2"),
    "sd3": ("transformer",),
    "flux": ("transformer", "text_encoder_2"),
}
"""By pipeline, what is exported of it: each kind of part once."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="mcd-", dir="/tmp") as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("MCINFER_CACHE", os.path.join(place, "cache"))
        patch.setenv("XDG_RUNTIME_DIR", place)
        yield


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By its name in `PIPELINES`, a pipeline and its models; exported once for all tests."""
    from mcinfer.diffusers import export
    from tests.diffusers.pipelines import PIPELINES, SIZES

    @cache
    def made(name: str) -> Example:
        folder = tmp_path_factory.mktemp(name)
        pipe = PIPELINES[name](folder / "vocabulary")
        models = export(pipe, folder / "onnx", PARTS[name], **SIZES[name])
        return Example(pipe=pipe, folder=folder / "onnx", models=models)

    return made


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.is_running()]
    assert not [child.cmdline() for child in left if "mcinfer.worker" in child.cmdline()]
