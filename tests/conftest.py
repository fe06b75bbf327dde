"""For all tests: nothing goes out (ONNX Runtime's telemetry), and nothing into the user's own cache."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from mcinfer.model_cache.cache import Cache

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Tests start hundreds of processes: each would compile the package, or start threads for linear algebra.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # pytest's own processes would compile all tests
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


# Each needs an environment of its own: `make test-diffusers`, and likewise.
collect_ignore = ["diffusers", "openvino", "programs", "ray", "serve"]

# A shell that runs tests in the background has them ignore Ctrl-C, and so would the programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No bound on the time of an example: the machine may be busy.
settings.register_profile("mcinfer", deadline=None, max_examples=60)
settings.register_profile("fuzz", deadline=None, max_examples=20_000)  # `make fuzz`
settings.load_profile("mcinfer")


_LARGE = (
    "onnx",
    "onnxruntime",
    "opentelemetry.sdk.trace",
    "prometheus_client",
    "pydantic",
    "rich.progress",
    "rich.table",
    "typer.main",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Of several processes that collect all tests, each compiles a part of them for all.

    In a fresh checkout each would compile all of them, at the same time. A module that cannot be imported
    is left to the collection, which reports it. Nothing is garbage that early: to look for it would take a
    fifth of the time.
    """
    gc.disable()
    config = session.config
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        root = Path(__file__).parent
        for path in sorted(root.rglob("test_*.py"))[number :: config.workerinput["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):
                name = path.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".")
                importlib.import_module(name)
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def prepared_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of prepared models, of this test run alone."""
    path = tmp_path_factory.mktemp("cache", numbered=True)
    path.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MCINFER_CACHE", str(path))
        yield path


@pytest.fixture(scope="session", autouse=True)
def _large_imports() -> None:
    """What tests would import later, and is large, is imported before the first."""
    for name in _LARGE:
        importlib.import_module(name)


@pytest.fixture(scope="module", autouse=True)
def _frozen_garbage(_large_imports: None) -> None:
    """What is there before a module's first test is no garbage: to look at it again and again takes time.

    It is imported modules, and the reports of the tests before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """The user's cache, in which nothing is yet."""
    monkeypatch.setenv("MCINFER_CACHE", str(tmp_path / "cache"))
    return Cache.default()


@pytest.fixture
def onnx_model(tmp_path: Path) -> Callable[[str], Path]:
    """Writes an ONNX model that is given in ONNX's text format, such as `tests.process.models.AFFINE`."""
    import onnx

    def write(text: str) -> Path:
        path = tmp_path / f"model{len([*tmp_path.glob('model*.onnx')]) + 1}.onnx"
        onnx.save(onnx.parser.parse_model(text), path)
        return path

    return write
