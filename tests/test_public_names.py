"""Tests of what `import mcinfer` gives, and of what it costs."""

import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mcinfer
from mcinfer import errors, protocol

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "mcinfer").rglob("*.py"))
HEAVY = ["numpy", "zmq", "msgpack", "psutil", "onnxruntime", "ml_dtypes", "asyncio"]


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return run.stdout


# Names.


@pytest.mark.parametrize("name", mcinfer.__all__)
def test_public_name_can_be_imported_and_says_what_it_is(name: str) -> None:
    value = getattr(mcinfer, name)
    assert value.__name__ == name
    assert value.__module__.startswith("mcinfer.")
    assert value.__doc__
    assert name in dir(mcinfer)


def test_public_names_are_sorted_and_none_is_twice() -> None:
    assert mcinfer.__all__ == sorted(set(mcinfer.__all__))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "mcinfer/__init__.py").read_text())
    seen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mcinfer.")
        for alias in node.names
    }
    assert seen == set(mcinfer.__all__)


def test_star_brings_all_public_names_and_no_other() -> None:
    given = python("from mcinfer import *; print(*(n for n in dir() if not n.startswith('_')))")
    assert given.split() == mcinfer.__all__


def test_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'mcinfer' has no attribute 'Slave'"):
        _ = mcinfer.Slave  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="Slave"):
        exec("from mcinfer import Slave")  # noqa: S102 as a user writes it


def test_every_exception_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined <= set(mcinfer.__all__)


@pytest.mark.parametrize("module", MODULES, ids=[str(m.relative_to(ROOT)) for m in MODULES])
def test_module_says_what_it_is_for(module: Path) -> None:
    assert ast.get_docstring(ast.parse(module.read_text()))


def test_version_is_a_number() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", mcinfer.__version__)


# What an import costs: workers start with these, before they watch for the master's end.


@pytest.mark.parametrize("module", ["mcinfer", "mcinfer.worker.__main__", "mcinfer.errors"])
def test_import_brings_nothing_heavy(module: str) -> None:
    given = python(f"import sys, {module}; print(*sys.modules)").split()
    assert module in given
    assert not set(HEAVY) & set(given)


def test_import_alone_brings_no_module_of_ours() -> None:
    given = python("import sys, mcinfer; print(*sys.modules)").split()
    assert [name for name in given if name.startswith("mcinfer")] == ["mcinfer"]


@pytest.mark.parametrize("module", ["mcinfer.master", "mcinfer.parallel"])
def test_master_imports_no_engine(module: str) -> None:
    given = python(f"import sys, {module}; print(*sys.modules)").split()
    assert "mcinfer.master" in given
    assert "onnxruntime" not in given
    assert not [name for name in given if name.startswith("mcinfer.engines")]


def test_import_starts_no_thread_and_sets_no_logging_up() -> None:
    code = (
        "import threading, logging, mcinfer.master, mcinfer.worker.server; "
        "print(threading.active_count(), logging.getLogger().handlers, "
        "logging.getLogger('mcinfer').handlers)"
    )
    assert python(code).split() == ["1", "[]", "[]"]


# The exceptions.

LINE = re.compile(r"([│├└─ ]*)(\w+)(?: \((\w+)\))?(?:  |$)")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """The tree in the docstring of errors.py: by name, the base above and the built-in."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = LINE.match(line.removeprefix("    "))
        if match is None or not match[2].endswith("Error"):
            continue
        depth = len(match[1])
        above = [(d, name) for d, name in above if d < depth]
        tree[match[2]] = (above[-1][1] if above else None, match[3])
        above.append((depth, match[2]))
    return tree


def test_exceptions_are_as_the_tree_draws_them() -> None:
    tree = drawn()
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(tree) == defined
    for name, (base, builtin) in tree.items():
        bases = getattr(errors, name).__bases__
        expected = [Exception if base is None else getattr(errors, base)]
        expected += [] if builtin is None else [getattr(builtins, builtin)]
        assert list(bases) == expected, name


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidInputError", ValueError),
        ("BuildError", RuntimeError),
        ("PredictError", RuntimeError),
        ("WorkerDiedError", RuntimeError),
        ("PredictTimeoutError", TimeoutError),
        ("QueueFullError", RuntimeError),
        ("ClosedError", RuntimeError),
        ("ProtocolError", RuntimeError),
        ("WeightAccessError", PermissionError),
        ("MissingDependencyError", ImportError),
    ],
)
def test_exception_can_be_caught_as_the_built_in_that_fits(
    name: str, builtin: type[Exception]
) -> None:
    error = getattr(mcinfer, name)
    assert issubclass(error, builtin)
    assert issubclass(error, mcinfer.McinferError)
    assert str(error("what happened")) == "what happened"


# The protocol's numbers.


def test_message_ids_are_those_of_the_sample_and_ours_follow() -> None:
    assert (
        protocol.ERROR,
        protocol.PREDICT,
        protocol.REPLY,
        protocol.BUILD_FINISH,
        protocol.EXIT,
    ) == (0, 1, 2, 3, 4)
    assert (
        protocol.HELLO,
        protocol.BUILD,
        protocol.CANCEL,
        protocol.ATTACH,
        protocol.DETACH,
        protocol.UPDATE_WEIGHTS,
        protocol.PREPARING,
        protocol.PREDICT_JOINED,
    ) == (5, 6, 7, 8, 9, 10, 11, 12)
    assert sorted(protocol.MESSAGES) == [*range(13)]
    assert all(number == message.ID for number, message in protocol.MESSAGES.items())
