"""Two checkouts of mcinfer in turns: what a change does to the time of a request.

    python benchmarks/checkouts.py OLD [--new .] [--quick] [--only PART]

A process of each checkout has a pool of two workers for an Identity model, and runs what it is asked for:
split requests of 8 KB to 64 MB from one caller (`predict`), and whole ones of 8 KB from 1, 4 and 16
(`submit`). The models, and the way to measure, are those beside this file.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

SIZES = {"8 KB": 1024, "0.8 MB": 100_000, "8 MB": 1_000_000, "64 MB": 8_000_000}
"""Of a batch of two, by name: elements of a row."""
CALLERS = (1, 4, 16)
MOST = 1.03
"""How many times as long as in the old checkout a request may take in the new one."""


class Checkout:
    """A process that has the package of a folder; a context manager."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(model)],
            env={**os.environ, "PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, kind: str, of: str, seconds: float) -> float:
        """What `serve` measures."""
        assert self._process.stdout is not None
        print(json.dumps([kind, of, seconds]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        self._process.communicate()  # closes its input, which is its end


def serve(model: str) -> None:
    """Measure what the lines of the input ask for: the seconds of a request, each time."""
    from measuring import Effort, answer, in_turns, rate_of_callers

    import mcinfer

    rng = np.random.default_rng(0)
    with mcinfer.Master(model, 2) as master:
        for line in sys.stdin:
            kind, of, seconds = json.loads(line)
            inputs = {"x": rng.standard_normal((2, SIZES.get(of, 1024)), np.float32)}
            if kind == "predict":
                way = {"": partial(master.predict, inputs)}
                found = in_turns(way, Effort(rounds=1, seconds=seconds))[""].middle
            else:
                submit = partial(master.submit, inputs)
                found = 1 / rate_of_callers(partial(answer, submit), int(of), seconds)
            print(found, flush=True)


def compare() -> int:
    """The command line; the exit status."""
    from measuring import Lines, Ratio, Setting, main, rates_in_turns, series_table
    from models import identity_model

    def measure(kind: str, names: list[str], setting: Setting) -> Lines:
        model = identity_model(setting.folder / "identity.onnx")
        seconds = setting.seconds(0.5)
        with ExitStack() as stack:
            sides = {
                side: stack.enter_context(Checkout(folder, model))
                for side, folder in (("old", setting.options.old), ("new", setting.options.new))
            }
            for name in names:
                ways = {s: partial(one.ask, kind, name, seconds) for s, one in sides.items()}
                for way in ways.values():
                    way()  # warm
                series = rates_in_turns(ways, setting.rounds)
                yield series_table(f"{kind}, {name}", series)
                over = series["new"].over(series["old"])
                yield str(Ratio(text="new / old", series=over, bound=MOST, at_least=False))

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("old", type=Path, help="a folder that has the package")
        parser.add_argument("--new", type=Path, default=Path(), help="another (default: this one)")

    parts = {
        "predict": partial(measure, "predict", [*SIZES]),
        "submit": partial(measure, "submit", [f"{callers}" for callers in CALLERS]),
    }
    return main(__doc__, parts, rounds=11, add_options=add_options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        sys.exit(compare())
