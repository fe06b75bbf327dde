"""Tests of what `import mcinfer` gives, and of what it costs."""

import builtins
import re
import subprocess
import sys
from pathlib import Path

import mypy.api
import pytest

import mcinfer
from mcinfer import errors

ROOT = Path(__file__).parents[1]
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


def test_dir_and_star_give_the_public_names_and_no_other() -> None:
    assert dir(mcinfer) == sorted(["__version__", *mcinfer.__all__])
    for name in mcinfer.__all__:
        assert getattr(mcinfer, name).__name__ == name
    given = python("from mcinfer import *; print(*(n for n in dir() if not n.startswith('_')))")
    assert given.split() == mcinfer.__all__


def test_misspelt_name_is_an_error_at_run_time_and_for_mypy(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="module 'mcinfer' has no attribute 'Mastr'"):
        _ = mcinfer.Mastr  # type: ignore[attr-defined]
    program = tmp_path / "program.py"
    uses = [f"mcinfer.{name}\n" for name in ("Mastr", *mcinfer.__all__)]
    program.write_text("".join(["import mcinfer\n", *uses]))
    options = ["--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path}"]
    said, _, status = mypy.api.run([*options, str(program), str(ROOT / "mcinfer/__init__.py")])
    assert status == 1
    assert re.findall(r'.*program\.py:(\d+): error: Module has no attribute "(\w+)"', said) == [
        ("2", "Mastr")
    ]


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
    assert defined <= set(mcinfer.__all__)
    for name, (base, builtin) in tree.items():
        bases = getattr(errors, name).__bases__
        expected = [Exception if base is None else getattr(errors, base)]
        expected += [] if builtin is None else [getattr(builtins, builtin)]
        assert list(bases) == expected, name
