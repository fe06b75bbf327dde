"""Programs that hold a session, as they are and below ``python -m mcinfer ort``: answers, starts and times.

    python benchmarks/programs.py [--write docs/programs.md] [--rounds N] [--only NAME]

`make bench-programs` installs the packages into an environment of their own. Each program of
benchmarks/program_cases.py is open three times, in three processes: with plain sessions, with inline ones,
and with sessions over two devices. They run their work in turns. Then each one's command line, where it has
one, runs in turns: from the start of its process to its end, with models that mcinfer has prepared in an
earlier run.

The exit status is 1 where an answer is another text, a number differs inline, or one differs by more than
1e-5 with workers.
"""

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from time import perf_counter
from typing import Any, Literal, Self

from measuring import Series, write_page
from program_cases import PROGRAMS, Program, difference

import mcinfer
from mcinfer.bench.figures import seconds_text
from mcinfer.bench.load import rotated

CASES = Path(__file__).with_name("program_cases.py")
DEVICES = 2
TURN_SECONDS = 1.5
"""Of one program in one round."""

Way = Literal["plain", "inline", "workers"]
OURS: Sequence[Way] = ("inline", "workers")
LAUNCHES: Mapping[Way, Sequence[str]] = {
    "plain": [],
    "inline": ["-m", "mcinfer", "ort"],
    "workers": ["-m", "mcinfer", "ort", "--devices", str(DEVICES)],
}
TOLERANCES: Mapping[Way, float] = {"plain": 0.0, "inline": 0.0, "workers": 1e-5}
"""Of the answers' numbers."""

Fars = dict[Way, float | None]
"""The largest difference of two answers' numbers, by way; None where their texts differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one piece of work, by rounds.

    Attributes:
        plain: Seconds with plain sessions.
        ratios: The seconds of each other way over those, by round.
    """

    plain: Series
    ratios: Mapping[Way, Series]

    @classmethod
    def of(cls, seconds: Mapping[Way, Sequence[float]]) -> Self:
        """Times from the seconds of each way, round by round."""
        pairs = {way: zip(seconds[way], seconds["plain"], strict=True) for way in OURS}
        return cls(
            plain=Series(tuple(seconds["plain"])),
            ratios={way: Series(tuple(a / b for a, b in pairs[way])) for way in OURS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a program.

    Attributes:
        fars: How far its answers are from those of plain sessions.
        work: Of one run of its work.
        command: Of its command line; None where it has none.
        shared: Of each inline session, whether it maps a prepared model.
    """

    name: str
    fars: Fars
    work: Times
    command: Times | None
    shared: Sequence[bool]

    @property
    def equal(self) -> bool:
        """Whether the answers are those of plain sessions."""
        return all(_is_equal(far, way) for way, far in self.fars.items())


def _is_equal(far: float | None, way: Way) -> bool:
    return far is not None and far <= TOLERANCES[way]


# A program that stays open.


class _Open:
    """A process that runs a program's work for each line."""

    def __init__(self, way: Way, name: str, folder: Path, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *LAUNCHES[way], str(CASES), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(cache),
        )
        self._read()

    def run(self) -> tuple[float, str]:
        """Seconds of one run, and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        message = self._read()
        return message["seconds"], message["answer"]

    def close(self) -> list[bool]:
        """End the process as a program ends, at the end of its input; which inline sessions are shared."""
        output, _ = self._process.communicate()
        if self._process.returncode or not output:
            raise SystemExit(f"a program ended with status {self._process.returncode}")
        shared: list[bool] = json.loads(output)["shared"]
        return shared

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"a program ended with status {self._process.wait()}")
        message: dict[str, Any] = json.loads(line)
        return message


def _environment(cache: Path) -> dict[str, str]:
    root = str(CASES.parents[1])
    return {
        **os.environ,
        "PYTHONPATH": root,
        "MCINFER_CACHE": str(cache),
        "ORT_DISABLE_TELEMETRY": "1",
    }


def measure_work(name: str, rounds: int, cache: Path) -> tuple[Times, Fars, list[bool]]:
    """Times of a run; how far the answers are; of each inline session, whether it is shared."""
    times: dict[Way, list[float]] = {way: [] for way in LAUNCHES}
    answers: dict[Way, set[str]] = {way: set() for way in LAUNCHES}
    with tempfile.TemporaryDirectory(prefix="mcinfer-program-") as folder:
        programs: dict[Way, _Open] = {}
        for way in LAUNCHES:
            own = Path(folder) / way
            own.mkdir()
            programs[way] = _Open(way, name, own, cache)
        # The first two runs: a session with workers may learn from the first how rows are split.
        firsts = {way: [program.run() for _ in range(2)] for way, program in programs.items()}
        for way, turn in firsts.items():
            answers[way] |= {answer for _, answer in turn}
        wanted = firsts["plain"][0][1]
        usual = min(seconds for turn in firsts.values() for seconds, _ in turn)
        runs = max(3, min(200, int(TURN_SECONDS / usual)))
        for number in range(rounds):
            for way, program in rotated([*programs.items()], number):
                turn = [program.run() for _ in range(runs)]
                times[way].append(statistics.median(seconds for seconds, _ in turn))
                answers[way] |= {answer for _, answer in turn}
        shared = {way: program.close() for way, program in programs.items()}
    return Times.of(times), _fars(wanted, answers), shared["inline"]


def measure_command(program: Program, rounds: int, cache: Path) -> tuple[Times, Fars]:
    """Times of a command line, and how far what it prints is from what it prints with plain sessions."""
    assert program.command is not None
    times: dict[Way, list[float]] = {way: [] for way in LAUNCHES}
    answers: dict[Way, set[str]] = {way: set() for way in LAUNCHES}
    with tempfile.TemporaryDirectory(prefix="mcinfer-program-") as folder:
        arguments = program.command(Path(folder))
        wanted = run_command("plain", arguments, cache)
        for way in OURS:
            run_command(way, arguments, cache)  # the models are prepared
        for number in range(rounds):
            for way in rotated([*LAUNCHES], number):
                start = perf_counter()
                answers[way].add(run_command(way, arguments, cache))
                times[way].append(perf_counter() - start)
    return Times.of(times), _fars(wanted, answers)


def run_command(way: Way, arguments: Sequence[str], cache: Path) -> str:
    """What a program prints.

    Raises:
        SystemExit: It failed; with what it printed.
    """
    done = subprocess.run(
        [sys.executable, *LAUNCHES[way], *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=_environment(cache),
        timeout=300,
    )
    if done.returncode:
        raise SystemExit(f"{way}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout or done.stderr


def _fars(wanted: str, answers: Mapping[Way, set[str]]) -> Fars:
    return {
        way: _largest([difference(wanted, one) for one in found]) for way, found in answers.items()
    }


def _largest(fars: Iterable[float | None]) -> float | None:
    largest = 0.0
    for far in fars:
        if far is None:
            return None
        largest = max(largest, far)
    return largest


# The table.


def outcome_table(outcomes: Sequence[Outcome], rounds: int, load: float) -> str:
    """All programs, in Markdown; `load` is the machine's load average before they ran."""
    lines = [
        "| program | its work | models inline | plain session | inline | two workers "
        "| whole command, plain | inline | two workers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        program = PROGRAMS[one.name]
        cells = [
            f"{program.package} {version(program.package)}",
            program.work,
            "shared" if all(one.shared) else "small",
            *_cells(one.work),
            *(["", "", ""] if one.command is None else _cells(one.command)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    packages = ("onnxruntime", "numpy", "torch", "opencv-python")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    far = _largest(one.fars["workers"] for one in outcomes)
    lines += [
        "",
        "Seconds of the plain way, and the other ways' time over it: below 1 is faster. Inline answers have"
        " the plain",
        f"session's bits; with workers, numbers differ by at most {far:.2g}. Medians of {rounds} rounds in"
        " turns, in brackets the least",
        f"and the greatest ratio of a round; {DEVICES} workers on {len(os.sched_getaffinity(0))} cores. The"
        f" machine's load average before was {load:.1f}: what else",
        "ran took from all ways, and more from that of fewer processes."
        f" Python {python_version()}, {versions}.",
    ]
    return "\n".join(lines)


def _cells(times: Times) -> list[str]:
    ratios = [times.ratios[way] for way in OURS]
    return [
        seconds_text(times.plain.middle),
        *(f"{one.middle:.2f} [{one.low:.2f} … {one.high:.2f}]" for one in ratios),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Run real programs, plain and with mcinfer.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page to put the table into")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way has its turn")
    parser.add_argument("--only", choices=[*PROGRAMS], help="one program")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    if options.only and options.write is not None:
        parser.error("--write: expected all programs, got --only")
    # As pip does with what it installs: where PYTHONDONTWRITEBYTECODE is set, each start would compile it.
    compileall.compile_dir(Path(mcinfer.__file__).parent, quiet=2)
    # Two workers, two cores: on larger machines a plain session would get more threads than both together.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:DEVICES])
    outcomes = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mcinfer-programs-") as folder:
        for name in [options.only] if options.only else PROGRAMS:
            cache = Path(folder) / name
            work, fars, shared = measure_work(name, options.rounds, cache)
            command = None
            if PROGRAMS[name].command is not None:
                command, printed = measure_command(PROGRAMS[name], options.rounds, cache)
                fars = {way: _largest([far, printed[way]]) for way, far in fars.items()}
            outcomes.append(
                Outcome(name=name, fars=fars, work=work, command=command, shared=shared)
            )
            found = [f"{way} {work.ratios[way].middle:.2f}, difference {fars[way]}" for way in OURS]
            print(f"{name}: {'; '.join(found)}", flush=True)
    unequal = [one.name for one in outcomes if not one.equal]
    if unequal:
        print(f"answers differ: {', '.join(unequal)}", file=sys.stderr)
        return 1
    text = outcome_table(outcomes, options.rounds, load)
    print(f"\n{text}")
    if options.write is not None:
        write_page(options.write, {"programs": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
