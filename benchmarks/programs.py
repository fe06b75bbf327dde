"""Programs that hold a session, as they are and below ``python -m mcinfer ort``: answers and times.

    python benchmarks/programs.py [--write docs/programs.md] [--rounds N] [--only NAME]

`make bench-programs` installs the packages into an environment of their own. Each program of
benchmarks/program_cases.py is open twice, in two processes: with a plain session, and with mcinfer's over two
devices. They run their work in turns. Then each one's command line, where it has one, runs in turns: from the
start of its process to its end, with models that mcinfer has prepared in an earlier run.

The exit status is 1 where an answer is another text, or a number of it differs by more than 1e-5.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from time import perf_counter
from typing import Any, Literal

from measuring import Series, write_page
from program_cases import PROGRAMS, Program, difference

from mcinfer.bench.load import rotated
from mcinfer.bench.texts import seconds_text

CASES = Path(__file__).with_name("program_cases.py")
DEVICES = 2
TOLERANCE = 1e-5
TURN_SECONDS = 1.5
"""Of one program in one round."""

Way = Literal["plain", "mcinfer"]
LAUNCHES: Mapping[Way, Sequence[str]] = {
    "plain": [],
    "mcinfer": ["-m", "mcinfer", "ort", "--devices", str(DEVICES)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a program.

    Attributes:
        far: The largest difference of two answers' numbers; None where their texts differ.
        work: Seconds of one run of its work, by way, and the ratio of both.
        command: Likewise of its command line; empty where it has none.
        served: How many runs of a model each worker did.
    """

    name: str
    far: float | None
    work: Mapping[str, Series]
    command: Mapping[str, Series]
    served: Sequence[int]

    @property
    def equal(self) -> bool:
        """Whether the answers are those of a plain session."""
        return self.far is not None and self.far <= TOLERANCE


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

    def close(self) -> list[int]:
        """End the process as a program ends, at the end of its input; how many runs each worker did."""
        output, _ = self._process.communicate()
        if self._process.returncode or not output:
            raise SystemExit(f"a program ended with status {self._process.returncode}")
        served: list[int] = json.loads(output)["served"]
        return served

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


def measure_work(
    name: str, rounds: int, cache: Path
) -> tuple[Mapping[str, Series], float | None, list[int]]:
    """Seconds of a run by way, with their ratio; the answers' largest difference; runs of each worker."""
    times: dict[Way, list[float]] = {way: [] for way in LAUNCHES}
    fars: list[float | None] = []
    with tempfile.TemporaryDirectory(prefix="mcinfer-program-") as folder:
        programs: dict[Way, _Open] = {}
        for way in LAUNCHES:
            own = Path(folder) / way
            own.mkdir()
            programs[way] = _Open(way, name, own, cache)
        # The first two runs: mcinfer's session may learn from the first how rows are split.
        firsts = {way: [program.run() for _ in range(2)] for way, program in programs.items()}
        wanted = firsts["plain"][0][1]
        fars += [difference(wanted, answer) for runs in firsts.values() for _, answer in runs]
        usual = min(seconds for runs in firsts.values() for seconds, _ in runs)
        runs = max(3, min(200, int(TURN_SECONDS / usual)))
        for number in range(rounds):
            for way, program in rotated([*programs.items()], number):
                turn = [program.run() for _ in range(runs)]
                times[way].append(statistics.median(seconds for seconds, _ in turn))
                fars += [difference(wanted, answer) for _, answer in turn]
        served = {way: program.close() for way, program in programs.items()}
    return _with_ratio(times), _largest(fars), served["mcinfer"]


def measure_command(
    program: Program, rounds: int, cache: Path
) -> tuple[Mapping[str, Series], float | None]:
    """Seconds of a command line by way, with their ratio, and the largest difference of what is printed."""
    assert program.command is not None
    times: dict[Way, list[float]] = {way: [] for way in LAUNCHES}
    fars: list[float | None] = []
    with tempfile.TemporaryDirectory(prefix="mcinfer-program-") as folder:
        arguments = program.command(Path(folder))
        wanted = run_command("plain", arguments, cache)
        run_command("mcinfer", arguments, cache)  # the models are prepared
        for number in range(rounds):
            for way in rotated([*LAUNCHES], number):
                start = perf_counter()
                answer = run_command(way, arguments, cache)
                times[way].append(perf_counter() - start)
                fars.append(difference(wanted, answer))
    return _with_ratio(times), _largest(fars)


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


def _with_ratio(times: Mapping[Way, Sequence[float]]) -> Mapping[str, Series]:
    ratios = [ours / plain for ours, plain in zip(times["mcinfer"], times["plain"], strict=True)]
    return {
        **{way: Series(tuple(values)) for way, values in times.items()},
        "ratio": Series(tuple(ratios)),
    }


def _largest(fars: Sequence[float | None]) -> float | None:
    known = [far for far in fars if far is not None]
    return max(known) if len(known) == len(fars) else None


# The table.


def outcome_table(outcomes: Sequence[Outcome], rounds: int, load: float) -> str:
    """All programs, in Markdown; `load` is the machine's load average before they ran."""
    lines = [
        "| program | its work | what was changed | largest difference | runs of the workers "
        "| plain session | with mcinfer | ratio | whole command, plain | with mcinfer |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        program = PROGRAMS[one.name]
        ratio = one.work["ratio"]
        cells = [
            f"{program.package} {version(program.package)}",
            program.work,
            "nothing",
            "**another text**" if one.far is None else "none" if not one.far else f"{one.far:.2g}",
            " + ".join(map(str, one.served)),
            seconds_text(one.work["plain"].middle),
            seconds_text(one.work["mcinfer"].middle),
            f"{ratio.middle:.2f} [{ratio.low:.2f} … {ratio.high:.2f}]",
            *(
                seconds_text(one.command[way].middle) if one.command else ""
                for way in ("plain", "mcinfer")
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    packages = ("onnxruntime", "numpy", "torch", "opencv-python")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines += [
        "",
        f"{DEVICES} workers on {len(os.sched_getaffinity(0))} cores; medians of {rounds} rounds in turns, in"
        " brackets the least and the greatest",
        f"ratio of a round. The machine's load average before was {load:.1f}: what else ran took from both,",
        f"and more from the way of fewer processes. Python {python_version()}, {versions}.",
    ]
    return "\n".join(lines)


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
    # Two workers, two cores: on larger machines a plain session would get more threads than both together.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:DEVICES])
    outcomes = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mcinfer-programs-") as folder:
        for name in [options.only] if options.only else PROGRAMS:
            cache = Path(folder) / name
            work, far, served = measure_work(name, options.rounds, cache)
            command: Mapping[str, Series] = {}
            if PROGRAMS[name].command is not None:
                command, also_far = measure_command(PROGRAMS[name], options.rounds, cache)
                far = _largest([far, also_far])
            outcomes.append(Outcome(name=name, far=far, work=work, command=command, served=served))
            print(f"{name}: difference {far}, ratio {work['ratio'].middle:.2f}", flush=True)
    text = outcome_table(outcomes, options.rounds, load)
    print(f"\n{text}")
    if not all(one.equal for one in outcomes):
        return 1
    if options.write is not None:
        write_page(options.write, {"programs": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
