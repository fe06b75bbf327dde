"""Tests of what `import mcinfer` gives, and of what it costs."""

import ast
import re
from pathlib import Path

import pytest

import mcinfer
from mcinfer import errors, protocol
from tests.process.scripts import printed

ROOT = Path(__file__).parents[1]
HEAVY = ["numpy", "zmq", "msgpack", "psutil", "onnxruntime", "ml_dtypes", "asyncio"]


def test_python_without_the_gil_is_refused_with_the_variable_that_switches_it_on() -> None:
    """Python 3.11 and 3.12 have no such build, so they are shown as a later one."""
    code = (
        "import sys; sys.version_info = max(sys.version_info, (3, 13)); sys._is_gil_enabled = lambda: {}\n"
        "try: import mcinfer; print('imported')\n"
        "except ImportError as exc: print(exc)"
    )
    assert printed(code.format(True)) == "imported\n"
    said = printed(code.format(False))
    assert said.startswith("mcinfer needs the GIL, ")
    assert "PYTHON_GIL=1" in said


# Names.


def test_dir_and_star_give_the_public_names_and_no_other() -> None:
    assert dir(mcinfer) == sorted(["__version__", *mcinfer.__all__])
    for name in mcinfer.__all__:
        assert getattr(mcinfer, name).__name__ == name
    given: dict[str, object] = {}
    exec("from mcinfer import *", given)  # noqa: S102 what a module would do
    assert sorted(given.keys() - {"__builtins__"}) == mcinfer.__all__


def test_messages_have_the_ids_of_the_sample() -> None:
    ids = [
        protocol.ERROR,
        protocol.PREDICT,
        protocol.REPLY,
        protocol.BUILD_FINISH,
        protocol.EXIT,
    ]
    assert ids == [0, 1, 2, 3, 4]


def test_page_about_stability_has_all_public_names_and_no_other() -> None:
    """Read from the sources, since some of these modules need packages that are not installed here."""
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(mcinfer[\w.]*)` \| (`.*`) \|$", page, re.M)
    promised = {module: re.findall(r"`(\w+)`", names) for module, names in rows}
    for file in (ROOT / "mcinfer").rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        defined = top_level_names(file)
        if (
            "__all__" in defined and module != "mcinfer.mslite.model"
        ):  # mcinfer.mslite has its names
            assert promised.pop(module) == ast.literal_eval(defined["__all__"])
        else:
            assert {*promised.pop(module, ())} <= defined.keys()
    assert promised == {}  # no such modules


def top_level_names(file: Path) -> dict[str, ast.expr]:
    """What a module defines, with the value where there is one."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = ast.Constant(None)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=value):
                found |= {each.id: value for each in names if isinstance(each, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return found


# What an import costs: workers start with these, before they watch for the master's end.


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("mcinfer", HEAVY),
        ("mcinfer.worker.__main__", HEAVY),
        ("mcinfer.parallel", ["onnxruntime", "mcinfer.engines"]),  # this imports mcinfer.master
    ],
)
def test_import_brings_nothing_heavy(module: str, without: list[str]) -> None:
    given = printed(f"import sys, {module}; print(*sys.modules)").split()
    assert module in given
    assert not set(without) & set(given)
    assert module != "mcinfer" or not [name for name in given if name.startswith("mcinfer.")]


def test_import_starts_no_thread_and_sets_no_logging_up() -> None:
    code = (
        "import threading, logging, mcinfer.master, mcinfer.worker.server; "
        "print(threading.active_count(), logging.getLogger().handlers, "
        "logging.getLogger('mcinfer').handlers)"
    )
    assert printed(code).split() == ["1", "[]", "[]"]


# The exceptions.

BUILT_IN = {
    "InvalidInputError": ValueError,
    "ModelNotFoundError": FileNotFoundError,
    "PredictTimeoutError": TimeoutError,
    "CollectiveTimeoutError": TimeoutError,
    "ReadyTimeoutError": TimeoutError,
    "WeightAccessError": PermissionError,
    "MissingDependencyError": ImportError,
}
"""The built-in exceptions that ours can be caught as; the others are `RuntimeError`."""


def test_exceptions_are_public_and_caught_as_the_built_in_ones() -> None:
    defined = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {*defined} <= {*mcinfer.__all__}
    for name, value in defined.items():
        assert issubclass(value, mcinfer.McinferError)
        if value is not mcinfer.McinferError:
            assert issubclass(value, BUILT_IN.get(name, RuntimeError))
    assert issubclass(mcinfer.ModelNotFoundError, mcinfer.BuildError)
    assert mcinfer.BuildError.__bases__ == mcinfer.PredictError.__bases__ == (mcinfer.EngineError,)


def test_table_of_changes_names_what_is_there() -> None:
    """Of docs/architecture.md: `a`, `b` (`module`) are names in that module."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## To change X, begin at Y\n")[1].split("\n## ")[0]
    found = re.findall(r"((?:`[\w.]+`(?:, | and )?)+) \(`([\w/]+)`\)", table)
    assert len(found) > 20
    for names, module in found:
        source = (ROOT / "mcinfer" / f"{module}.py").read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"(class|def) {part}\b|^{part} =", source, re.M), (name, module)
