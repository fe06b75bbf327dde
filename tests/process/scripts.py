"""Programs of users: processes of their own with a pool in them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]

FORKS = {"PYTHONWARNINGS": "ignore:This process (pid=:DeprecationWarning"}
"""From Python 3.12 on, a program that forks beside threads would be warned of it on its standard error."""

PREAMBLE = """
import os, signal, sys, time
import numpy as np
import mcinfer

X = {"x": np.ones((4, 4), np.float32)}

def say(*values):
    print(*values, flush=True)

def say_pids(master):
    say("pids", *(worker.pid for worker in master.statistics().workers))

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    status: int
    out: str
    err: str


class Program:
    """A running program; a context manager that leaves no process behind."""

    _FORKS = "ignore:This process (pid=:DeprecationWarning"
    """Python 3.12 and later warn of every fork with threads."""

    def __init__(
        self,
        text: str,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        talks: bool = False,
        command: Sequence[str] = (sys.executable,),
    ) -> None:
        """Start it, in a session and process group of its own.

        Args:
            text: The program.
            arguments: For `sys.argv`.
            cwd: The working folder.
            env: More environment variables; the package is on PYTHONPATH by default.
            stdin: The interpreter reads the program from its standard input.
            talks: It reads lines there, for `ask`.
            command: The interpreter.
        """
        source = ["-"] if stdin else ["-c", text]
        self._process = subprocess.Popen(
            [*command, "-W", self._FORKS, *source, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **FORKS, **(env or {})},
            stdin=subprocess.PIPE if stdin or talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        if stdin:
            assert self._process.stdin is not None
            self._process.stdin.write(text)
            self._process.stdin.close()
            self._process.stdin = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().rstrip("\n")

    def ask(self, line: object) -> str:
        """The next line that it prints, after it got this one."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.line()

    def error_line(self) -> str:
        """The next line that it prints to its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr.readline().rstrip("\n")

    def pids(self) -> list[int]:
        """The next line, which `say_pids` prints."""
        words = self.line().split()
        assert words[:1] == ["pids"], words
        return [int(word) for word in words[1:]]

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the whole process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait(self, timeout: float = 50.0) -> Ended:
        """Its end, and what it printed after the lines that were read."""
        out, err = self._process.communicate(timeout=timeout)
        return Ended(status=self._process.returncode, out=out, err=err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def run(text: str, *arguments: object) -> Ended:
    """Run a program to its end."""
    with Program(PREAMBLE + text, *arguments) as program:
        return program.wait()


def printed(code: str) -> str:
    """What a program prints that ends well; nothing is imported for it."""
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout


def run_python(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 50.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these arguments to its end; `env` are more variables, as of `Program`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_example(
    name: str, *arguments: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder of examples to its end."""
    return run_python(ROOT / "examples" / name, *arguments, cwd=cwd)


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code in a language that a page has."""
    text = page.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_documented(text: str, folder: Path, python: str = sys.executable) -> str:
    """Run a program of the documentation in a folder to its end, without a warning: what it prints."""
    with Program(text, cwd=folder, command=(python, "-W", "error")) as program:
        ended = program.wait()
    assert (ended.status, ended.err) == (0, "")
    return ended.out
