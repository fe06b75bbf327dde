"""Tests of mcinfer/process.py, with real processes that hang and crash."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcinfer.process import REQUEST, StackReport
from tests.process.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading, time
{handler}

def deep_down(act):
    print("here", flush=True)
    act()

acts = {{
    "python": lambda: time.sleep(60),
    # Holds the interpreter's lock; the signal ends the first sleep.
    "native": lambda: [ctypes.PyDLL(None).sleep(60) for _ in range(2)],
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "echo": lambda: print(sys.stdin.readline(), end="", flush=True),
}}
deep_down(acts[sys.argv[2]])
"""
WITH_HANDLER = """
from mcinfer.process import write_stacks_to
write_stacks_to(int(sys.argv[1]))
"""


@contextmanager
def child(
    report: StackReport, act: str, handler: str = WITH_HANDLER
) -> Iterator["subprocess.Popen[str]"]:
    """A process that has come to where it hangs, or crashes."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(handler=handler), str(report.fd), act],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[report.fd],
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(name="report")
def _report() -> Iterator[StackReport]:
    report = StackReport()
    yield report
    report.close()


def asleep(process: "subprocess.Popen[str]") -> bool:
    """Whether its main thread waits in the kernel."""
    text = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii")
    return text.rpartition(")")[2].split()[0] == "S"


def asked(process: "subprocess.Popen[str]", report: StackReport, last: str = "<module>") -> str:
    """Its stacks, asked for when it sleeps; whole once the outermost frame of its main thread is there."""
    wait_until(lambda: asleep(process))
    process.send_signal(REQUEST)
    wait_until(lambda: last in report.read())
    return report.read()


def test_memory_is_sealed_against_another_size(report: StackReport) -> None:
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(report.fd, size)
    assert fcntl.fcntl(report.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@pytest.mark.parametrize("act", ["python", "native"])
def test_process_writes_its_stacks_also_in_native_code(report: StackReport, act: str) -> None:
    with child(report, act) as process:
        text = asked(process, report)
        assert "(most recent call first)" in text
        assert "in deep_down" in text
        assert process.poll() is None


@pytest.mark.parametrize(
    ("act", "reason", "number"),
    [
        ("segfault", "Fatal Python error: Segmentation fault", signal.SIGSEGV),
        ("abort", "Fatal Python error: Aborted", signal.SIGABRT),
    ],
)
def test_process_that_crashes_leaves_its_stack(
    report: StackReport, act: str, reason: str, number: signal.Signals
) -> None:
    with child(report, act) as process:
        _, err = process.communicate(timeout=40.0)
        assert process.returncode == -number
        text = report.read()
        assert text.startswith(reason)
        assert "in deep_down" in text
        assert "Fatal Python error" not in err


def test_process_without_the_handler_ignores_the_request(report: StackReport) -> None:
    with child(report, "echo", "") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.send_signal(REQUEST)
        print("still here", file=process.stdin, flush=True)
        assert process.stdout.readline() == "still here\n"
        assert report.read() == ""


def test_what_a_process_scribbles_is_text_to_its_reader(report: StackReport) -> None:
    os.pwrite(report.fd, b"\xff\xfe Native \r\n" * 10 + b"\0 more", 0)
    assert "Native" in report.read()
    assert "more" not in report.read()
    os.pwrite(report.fd, b"x" * (256 << 10), 0)
    assert len(report.read()) == 256 << 10
