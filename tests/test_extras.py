"""Tests of mcinfer/extras.py."""

import importlib
import sys
from importlib import metadata
from pathlib import Path

import pytest

from mcinfer.errors import MissingDependencyError
from mcinfer.extras import install, requires, version_of
from tests.process.scripts import run_python

REQUIRES = [
    "numpy>=2",
    'nothing-such>=1.5; extra == "cli"',
    'pytest>=1; extra == "cli"',
    'neither; extra == "ml-dtypes"',
    'absent[data,serve]>=2; extra == "serve"',
    'mcinfer[cli,ml-dtypes]; extra == "serve"',
    'pytest<99; extra == "there"',
]


@pytest.mark.parametrize(
    ("extra", "command"),
    [
        ("cli", "pip install 'nothing-such>=1.5'"),  # pytest is there
        ("ml-dtypes", "pip install neither"),
        ("serve", "pip install 'absent[data,serve]>=2' 'nothing-such>=1.5' neither"),
        (
            "there",
            "pip install 'pytest<99' (with --force-reinstall if pip says that all of it is there)",
        ),
        ("none", "install the packages of the extra 'none' in mcinfer's setup.cfg"),
    ],
)
def test_command_names_the_packages_that_are_missing_else_all(
    extra: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: {"mcinfer": REQUIRES}[name])
    assert install(extra) == command


def test_command_after_an_uninstall_names_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: {"mcinfer": REQUIRES}[name])
    assert install("cli", anew=True) == "pip install 'nothing-such>=1.5' 'pytest>=1'"
    assert install("there", anew=True) == "pip install 'pytest<99'"


def test_version_of_a_package_is_that_of_the_one_which_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a virtual environment that also has the system's packages."""
    for number in (1, 2):
        info = tmp_path / str(number) / f"some_package-{number}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: some_package\nVersion: {number}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "2"), str(tmp_path / "1")])
    assert version_of("some-package") == "2"
    assert version_of("other-package") is None


def test_every_extra_that_mcinfer_names_has_packages() -> None:
    extras = metadata.distribution("mcinfer").metadata.get_all("Provides-Extra")
    assert extras
    for extra in extras:
        assert install(extra).startswith("pip install ")


def test_program_without_metadata_is_told_of_the_extra(tmp_path: Path) -> None:
    package = Path(__file__).parent.parent / "mcinfer"
    (tmp_path / "mcinfer").symlink_to(package)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import mcinfer.extras as e; print(e.install('cli'))"
    run = run_python("-I", "-S", "-c", code, tmp_path)
    assert run.stdout == "install the packages of the extra 'cli' in mcinfer's setup.cfg\n"


@pytest.mark.parametrize(
    ("content", "raised"),
    [
        (None, "needs it"),
        ("import wanted_package.no_such_part", "needs it"),
        ("from inspect import of_the_program", "cannot import name 'of_the_program'"),
        ("import no_such_other_package", "No module named 'no_such_other_package'"),
        ("raise ImportError('libwanted.so: cannot open')", "libwanted.so: cannot open"),
        ("raise ModuleNotFoundError('of no name')", "of no name"),
    ],
)
def test_only_a_package_that_is_not_there_is_said_to_be_missing(
    content: str | None, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "wanted_package").mkdir()
        (tmp_path / "wanted_package" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=raised) as caught, requires("needs it", "wanted_package"):
        importlib.import_module("wanted_package")
    assert isinstance(caught.value, MissingDependencyError) == (raised == "needs it")


def test_extra_adds_the_command_and_several_modules_the_one_that_lacks() -> None:
    needs = requires("it needs two", "wanted_a", "wanted_b", extra="onnx")
    with pytest.raises(MissingDependencyError) as caught, needs:
        importlib.import_module("wanted_b")
    text = "it needs two (No module named 'wanted_b'): pip install 'onnx>="
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("module", "package", "command"),
    [
        ("exporters.prometheus", "prometheus_client.core", "pip install 'prometheus"),
        ("exporters.opentelemetry", "opentelemetry", "pip install 'opentelemetry"),
        ("ray", "ray", "pip install 'ray"),
        ("diffusers", "diffusers", "pip install '?diffusers"),
        ("diffusers", "torch", "pip install '?diffusers"),
        ("ort", "onnxruntime", "pip install 'onnxruntime>="),
        ("ranks.collectives.mpi", "mpi4py", "need the package mpi4py: pip install 'mpi4py>="),
    ],
)
def test_module_without_its_package_says_what_to_install(
    module: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"mcinfer.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(MissingDependencyError, match=command):
        importlib.import_module(f"mcinfer.{module}")
