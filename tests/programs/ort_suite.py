"""ONNX Runtime's own tests of sessions, with `mcinfer.ort.InferenceSession` in the place of its session.

    python -m tests.programs.ort_suite FOLDER [--only TEXT] [--write docs/ort_suite.md]

FOLDER is ``onnxruntime/test/python`` of a checkout of https://github.com/microsoft/onnxruntime, best at the
version that is installed; nothing of it is in this repository. The tests run three times in processes of
their own: as they are; with inline sessions, which prepare each model, however small; and below
``python -m mcinfer ort --devices 2``. They are not changed. Where FOLDER contains
``libcustom_op_library.so``, as a build of ONNX Runtime does, the test of custom operators finds it.

A test that passes with a plain session has to pass inline; and with workers, or has to be in `WHY_NOT`. The
exit status is 1 where one is neither, and where one of `WHY_NOT` passes. `--write` puts the table between
the marks of a page.
"""

import argparse
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]

FILES = (
    "onnxruntime_test_python.py",
    "onnxruntime_test_python_backend.py",
    "onnxruntime_test_python_iobinding.py",
    "onnxruntime_test_python_mlops.py",
    "onnxruntime_test_python_nested_control_flow_op.py",
    "onnxruntime_test_python_sparse_matmul.py",
    "onnxruntime_test_python_symlink_data.py",
)
"""Those whose tests open sessions on the CPU. Only the first must be there."""

DEVICES = 2
LAUNCH = ["-m", "mcinfer", "ort", "--devices", str(DEVICES)]
SECONDS = 120.0
"""How long a test may take before its process ends."""

LARGEST_DATA_BYTES = 4 << 20
"""Files of the folder testdata beyond this size are not copied: no test of `FILES` opens one."""

WHY_NOT: Mapping[str, Sequence[str]] = {
    "only tensors go to workers, not sequences, maps, optional or sparse values": (
        "test_dict_vectorizer",
        "test_run_contrib_sparse_mat_mul",
        "test_run_model_with_optional_sequence_input",
        "test_run_sparse_output_only",
        "test_run_sparse_output_ort_value_vector",
        "test_sequence_construct",
        "test_sequence_insert",
        "test_sequence_length",
        "test_zip_map_int64_float",
        "test_zip_map_string_float",
    ),
    "each worker would write a profile of its own (`enable_profiling`)": (
        "test_profiler_get_start_time_ns",
        "test_profiler_with_session_options",
    ),
    "workers do not report which provider took a node": (
        "test_get_graph_provider_assignment_info",
    ),
    "workers read no options from a model (`ORT_LOAD_CONFIG_FROM_MODEL`)": (
        "test_loading_session_options_from_model",
    ),
    "a model of IR version 3 has no weights that can be replaced (`add_initializer`)": (
        "test_session_options_add_initializer",
    ),
    "a worker opens the model with its own data, and that is not on disk (`add_external_initializers`)": (
        "test_session_options_add_external_initializers",
    ),
    "an adapter lies in the program's memory; `Master.update_weights` replaces weights": (
        "test_run_with_adapter",
    ),
}
"""The tests that pass with a plain session alone, by what keeps mcinfer's from it."""

SAYS_SO = ("Unsupported: ", "RunFailed: ")
"""How the errors of these tests begin: by mcinfer's own classes. What raises differently is a problem."""

CANNOT_HOLD = {name: reason for reason, names in WHY_NOT.items() for name in names}

Outcome = Literal["passed", "failed", "skipped"]
Way = Literal["plain", "inline", "workers"]
WAYS: tuple[Way, ...] = ("plain", "inline", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a test.

    Attributes:
        text: The last line of its first error, or why it is skipped.
        sessions: How many sessions it opened.
    """

    outcome: Outcome
    text: str = ""
    sessions: int = 0


# In the process that runs the tests.


class _Reporter(unittest.TestResult):
    """Writes a line of JSON before and behind each test."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._pipe = pipe
        self._sessions = _count_sessions()
        self._errors: list[str] = []
        self._skips: list[str] = []
        self._before = 0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self._errors, self._skips, self._before = [], [], self._sessions[0]
        self._write({"start": test.id()})

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        sessions = self._sessions[0] - self._before
        outcome: Outcome = "passed"
        if self._errors:
            outcome = "failed"
        elif self._skips and not sessions:
            outcome = "skipped"
        text = next(iter(self._errors or self._skips), "") if outcome != "passed" else ""
        self._write({"end": test.id(), "outcome": outcome, "text": text, "sessions": sessions})

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: ARG002, N802
        # The class and the first line that says something.
        lines = [line.strip() for line in str(err[1]).splitlines() if line.strip()]
        self._errors.append(f"{err[0].__name__}: {lines[0] if lines else ''}")

    addFailure = addError  # noqa: N815

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: ARG002, N802
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._skips.append(reason)

    def _write(self, message: Mapping[str, object]) -> None:
        os.write(self._pipe, json.dumps(message).encode() + b"\n")


def _count_sessions() -> list[int]:
    """Count the sessions that programs open from now on: the one element of the list."""
    import onnxruntime

    count = [0]
    opened: Any = onnxruntime.InferenceSession
    original = opened.__init__

    def counted(self: object, *args: object, **kwargs: object) -> None:
        count[0] += 1
        original(self, *args, **kwargs)

    opened.__init__ = counted
    return count


def run_tests(way: str, pipe: int, files: Sequence[str], skip: Sequence[str], only: str) -> None:
    """Run tests of the modules in this folder but those of `skip`, and write to the pipe how they end."""
    import onnxruntime

    if way == "inline":
        from mcinfer import ort

        ort.install(prepare="always")
    if (found := onnxruntime.InferenceSession.__module__.partition(".")[0]) != (
        "onnxruntime" if way == "plain" else "mcinfer"
    ):
        raise SystemExit(f"onnxruntime.InferenceSession is of {found}")
    sys.path.insert(0, os.getcwd())
    names = [Path(file).stem for file in files]
    suite = unittest.defaultTestLoader.loadTestsFromNames(names)
    chosen = (test for test in _each(suite) if only in test.id() and test.id() not in skip)
    unittest.TestSuite(chosen).run(_Reporter(pipe))


def _each(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _each(test)
        else:
            yield test


# In the process that compares.


def run_way(way: Way, folder: Path, only: str = "") -> dict[str, Result]:
    """Run all tests of a folder in processes of their own; by the test's id.

    A process that ends in a test, or takes too long, is followed by one for the tests behind it.
    """
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="mcinfer-suite-") as made:
        place = Path(made)
        files = _lay_out(folder, place)
        while (ended := _run_process(way, place, files, [*results], only)).pop("", None):
            results |= ended
        results |= ended
    return results


def _lay_out(folder: Path, place: Path) -> list[str]:
    """Copy tests and data to where a build of ONNX Runtime has them: in the current folder."""
    files = [name for name in FILES if (folder / name).is_file()]
    if FILES[0] not in files:
        raise SystemExit(f"{folder}: expected a folder with {FILES[0]}, as onnxruntime/test/python")
    for name in (*files, "helper.py", "libcustom_op_library.so"):
        if (folder / name).is_file():
            shutil.copy(folder / name, place / name)

    def large(parent: str, names: list[str]) -> list[str]:
        paths = (Path(parent) / name for name in names)
        return [path.name for path in paths if path.stat().st_size > LARGEST_DATA_BYTES]

    for data in (folder / "testdata", folder.parent / "testdata"):
        if data.is_dir():
            shutil.copytree(data, place / "testdata", ignore=large, dirs_exist_ok=True)
    (place / "testdata").mkdir(exist_ok=True)
    return files


def _run_process(
    way: Way, place: Path, files: Sequence[str], skip: Sequence[str], only: str
) -> dict[str, Result]:
    """Run what is not in `skip`; below "" is a result if the process ended before its last test did."""
    reading, writing = os.pipe()
    launch = LAUNCH if way == "workers" else []
    arguments = ["--in-process", json.dumps([way, writing, files, skip, only])]
    own = {"PYTHONPATH": ROOT, "MCINFER_CACHE": place / "cache", "ORT_DISABLE_TELEMETRY": "1"}
    with (place / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *launch, str(Path(__file__).resolve()), *arguments],
            cwd=place,
            env=os.environ | {name: str(value) for name, value in own.items()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            results, running, in_time = _read_results(reading)
        finally:
            os.close(reading)
        if not in_time:
            process.kill()
        status = process.wait(SECONDS)
    if running is not None:
        how = f"its process ended with {_status_text(status)}" if in_time else "it took too long"
        results[running] = results[""] = Result(outcome="failed", text=how)
    elif status or not results:
        tail = deque((place / "output.txt").read_text("utf-8", "replace").splitlines(), 20)
        raise SystemExit(f"the tests ended with {_status_text(status)}:\n" + "\n".join(tail))
    return results


def _read_results(reading: int) -> tuple[dict[str, Result], str | None, bool]:
    """What a process writes until it ends, the test that did not end, and whether all was in time."""
    results: dict[str, Result] = {}
    running: str | None = None
    rest, until = b"", monotonic() + SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while selector.select(max(0.0, until - monotonic())):
            if not (got := os.read(reading, 1 << 16)):
                return results, running, True
            *lines, rest = (rest + got).split(b"\n")
            for line in lines:
                message = json.loads(line)
                running = message.pop("start", None)
                until = monotonic() + SECONDS
                if running is None:
                    name = message.pop("end")
                    results[name] = Result(**message)
    return results, running, False


def _status_text(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


# The table.


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On one test."""

    name: str
    words: str
    group: Literal["passes", "cannot hold", "not comparable", "no session", "problem"]
    sessions: int


def compare(
    plain: Mapping[str, Result], inline: Mapping[str, Result], workers: Mapping[str, Result]
) -> list[Verdict]:
    """Say of each test how it ends."""
    verdicts = []
    for name, one in plain.items():
        _, class_name, method = name.split(".")
        other = workers[name]
        reason = CANNOT_HOLD.get(method)
        group: Any = "passes"
        words = "passes"
        if one.outcome == "skipped":
            group, words = "not comparable", f"skips itself: {one.text}"
        elif one.outcome == "failed":
            group, words = "not comparable", f"fails with a plain session too: {one.text}"
        elif inline[name].outcome != "passed":
            group, words = "problem", f"**fails** inline: {inline[name].text}"
        elif other.outcome == "passed":
            if reason is not None:
                group, words = "problem", f"passes, but is to fail: {reason}"
            elif not one.sessions:
                group, words = "no session", "passes"
        elif reason is not None and other.text.startswith(SAYS_SO):
            group, words = "cannot hold", f"cannot hold: {reason}"
        else:
            group, words = "problem", f"**fails**: {other.text}"
        verdicts.append(
            Verdict(name=f"{class_name}.{method}", words=words, group=group, sessions=one.sessions)
        )
    return verdicts


def table(verdicts: Sequence[Verdict], files: int, release: str) -> str:
    """The verdicts, in Markdown; `release` is that of the tests."""
    rows = [
        f"| `{one.name}` | {one.sessions} | {_cell(one.words)} |"
        for one in verdicts
        if one.group in ("cannot hold", "not comparable")
    ]
    counts = {
        group: sum(one.group == group for one in verdicts)
        for group in ("passes", "cannot hold", "not comparable", "no session")
    }
    return "\n".join(
        [
            f"{_count(len(verdicts), 'test')} of {_count(files, 'file')}. Inline, all that pass with a plain"
            f" session pass. With two workers, {counts['passes']} pass and",
            f"{counts['cannot hold']} cannot hold; {counts['not comparable']} skip themselves or fail with a"
            f" plain session too. {counts['no session']} more pass and open no session here. The table has"
            f" those that do not pass. Tests of ONNX Runtime {release}, with onnxruntime"
            f" {version('onnxruntime')} and numpy {version('numpy')}.",
            "",
            "| test | sessions | with two workers |",
            "|---|---|---|",
            *rows,
        ]
    )


def _release(folder: Path) -> str:
    """The version that a checkout says of itself."""
    path = folder.parents[2] / "VERSION_NUMBER"
    return path.read_text("utf-8").strip() if path.is_file() else "of an unknown version"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cell(text: str) -> str:
    text = text if len(text) <= 200 else f"{text[:199]}…"
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_page(path: Path, part: str) -> None:
    """Put the table between the page's marks."""
    marked = re.compile(r"(<!-- suite: begin -->\n).*?(<!-- suite: end -->)", re.DOTALL)
    page, count = marked.subn(
        lambda match: f"{match[1]}\n{part}\n\n{match[2]}", path.read_text("utf-8")
    )
    if not count:
        raise SystemExit(f"{path}: expected a line '<!-- suite: begin -->', and its end below")
    path.write_text(page, "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Run ONNX Runtime's own tests of sessions.")
    parser.add_argument(
        "folder", type=Path, nargs="?", help="onnxruntime/test/python of a checkout"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="tests with this in their name")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process is not None:
        run_tests(*json.loads(options.in_process))
        return 0
    if options.folder is None:
        parser.error("expected the folder of the tests")
    if options.only and options.write is not None:
        parser.error("--write: expected all tests, got --only")
    results = [run_way(way, options.folder.resolve(), options.only) for way in WAYS]
    verdicts = compare(*results)
    for one in verdicts:
        if one.group != "no session":
            print(f"{one.name}: {one.words}")
    files = len({name.partition(".")[0] for name in results[0]})
    text = table(verdicts, files, _release(options.folder.resolve()))
    print("\n" + text.partition("\n\n")[0])
    if any(one.group == "problem" for one in verdicts):
        return 1
    if options.write is not None:
        write_page(options.write, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
