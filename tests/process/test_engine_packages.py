"""Engines that other packages bring: docs/engines.md as it stands, and what may be wrong with one."""

import configparser
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mcinfer
from mcinfer import BuildError, MissingDependencyError
from mcinfer.engines.adapters import ENTRY_POINTS, OWN, open_engine
from tests.engine_requests import engine_request
from tests.process.scripts import ROOT, blocks

PROGRAM, USE = blocks(ROOT / "docs" / "engines.md", "python")
WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages on the path, as a master's workers get it."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, name: str, program: str) -> None:
    """What an installer leaves of a package with one module, `name`_engine, and its entry point."""
    (site / f"{name}_engine.py").write_text(program, encoding="utf-8")
    about = site / f"{name}_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {name}_engine\n")


@pytest.fixture
def model(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the page's engine, which is installed."""
    install(site, "linear", PROGRAM)
    monkeypatch.chdir(site)
    np.savez("model.npz", weight=WEIGHT, bias=np.ones(3, np.float32))
    return site / "model.npz"


@pytest.mark.usefixtures("model")
def test_engine_of_another_package_runs_batches_on_workers() -> None:
    x = np.random.default_rng(0).random((64, 4), np.float32)
    given: dict[str, Any] = {"mcinfer": mcinfer, "x": x}
    exec(USE, given)  # noqa: S102 the page's
    assert np.allclose(given["answers"], x @ (2 * WEIGHT) + 1)
    assert "linear_engine" not in sys.modules  # but in the workers


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("cuda:0", {}, r"engine linear has no device cuda:0, expected one of \['cpu:0'\]"),
        ("cpu:0", {"streams": 2}, "streams: got 2, but the engine linear has no streams"),
        ("cpu:0", {"session_config": {"a": "b"}}, r"linear: got \['a'\] in session_config"),
    ],
)
def test_device_or_option_that_it_does_not_have_is_refused(
    model: Path, device: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        open_engine("linear", engine_request(model, device, **{"threads": None, **options}))


MISSING = """
from mcinfer.extras import requires
with requires("engine mine needs Nothing: pip install nothing", "nothing"):
    import nothing
"""


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("1 / 0", BuildError, "^engine mine cannot be imported: division by zero$"),
        ("import nothing", BuildError, "^engine mine cannot be imported: No module named"),
        (MISSING, MissingDependencyError, "^engine mine needs Nothing: pip install nothing$"),
        ("DEVICES = ()", BuildError, "^engine mine: <module 'mine_engine'.* has no function load$"),
        ("load = lambda r: r", BuildError, "load gave EngineRequest, expected Engine$"),
    ],
)
def test_module_that_is_no_adapter_is_a_build_error(
    site: Path, program: str, error: type[Exception], words: str
) -> None:
    install(site, "mine", program)
    (site / "model").write_bytes(b"model")
    try:
        with pytest.raises(error, match=words):
            open_engine("mine", engine_request(site / "model"))
    finally:
        sys.modules.pop("mine_engine", None)


def test_engines_of_mcinfer_are_entry_points_by_the_same_names() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"][ENTRY_POINTS].split("\n")
    assert dict(line.split(" = ") for line in lines if line) == OWN
