"""One cluster of Ray for all tests: a node of four CPUs and two GPUs, whatever the machine has."""

import json
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import pytest
import ray
from numpy.typing import NDArray

from mcinfer.examples import encoder
from tests.process import waiting

ROOT = Path(__file__).resolve().parents[2]

CPUS = 4

OF_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would send them
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it then listens on the loopback alone
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # it would keep one in the home folder
    "PYTHONPATH": str(ROOT),
}

IMAGES = np.random.default_rng(7).random((24, 3, 32, 32), dtype=np.float32)


wait_until = partial(waiting.wait_until, timeout=60.0)


def fake_model(folder: Path, **more: object) -> Path:
    """A model of the fake engine that gives its input, unless `more` says otherwise."""
    model: dict[str, object] = {
        "inputs": [["x", "float32", ["n", 2]]],
        "outputs": [["y", "float32", ["n", 2], {"from": "x"}]],
    }
    path = folder / "model.json"
    path.write_text(json.dumps({**model, **more}))
    return path


@pytest.fixture(scope="session", autouse=True)
def folders() -> Iterator[Path]:
    """Where Ray, the model cache and the workers keep files. Short, as the paths of sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="mcr-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        patch.setenv("MCINFER_CACHE", str(path / "cache"))
        for name, value in OF_RAY.items():
            patch.setenv(name, value)
        yield path
    shutil.rmtree(path, ignore_errors=True)  # Ray's last process may still write its log


@pytest.fixture(scope="session")
def cluster(folders: Path) -> Iterator[Path]:
    """The cluster, and the folder of its logs. No process of it is left behind."""
    ray.init(
        address="local",
        num_cpus=CPUS,
        num_gpus=2,
        object_store_memory=200 << 20,
        include_dashboard=False,
        _temp_dir=str(folders / "ray"),
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield folders / "ray" / "session_latest" / "logs"
    started = psutil.Process().children(recursive=True)
    ray.shutdown(wait_for_processes=True)
    wait_until(lambda: waiting.all_gone([one.pid for one in started]))


@pytest.fixture
def actor(cluster: Path) -> Iterator[Callable[..., Any]]:  # noqa: ARG001 it is to be there
    """Makes actors of a class with options of Ray's, and kills them at the end of the test."""
    made = []

    def make(kind: Any, /, *arguments: Any, of_ray: Any = None, **named: Any) -> Any:
        made.append(kind.options(**(of_ray or {})).remote(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        ray.kill(one)
    cpus = ray.cluster_resources()["CPU"]
    wait_until(lambda: ray.available_resources().get("CPU") == cpus)


@pytest.fixture(scope="session")
def expected() -> NDArray[np.float32]:
    """What one plain session says of `IMAGES`."""
    session = ort.InferenceSession(encoder(), providers=["CPUExecutionProvider"])
    result: NDArray[np.float32] = session.run(["embedding"], {"image": IMAGES})[0]
    return result


def pids(one: Any) -> list[int]:
    """The workers of an actor."""
    workers = ray.get(one.statistics.remote(), timeout=60).workers
    return [worker.pid for worker in workers]
