"""Fuzz for as long as asked: ``python -m tests.fuzz --target all --inputs 1000000 --seed 0``."""

import argparse
import sys
from pathlib import Path

from tests.fuzz.fuzzing import TARGETS, Finding, fuzz

_TIME_LIMIT = 10.0


def main() -> int:
    """Run the fuzzer; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    parser.add_argument("--inputs", type=int, default=100_000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this input alone, as a failure names it")
    parser.add_argument("--failures", type=Path, default=Path("build/fuzz"))
    arguments = parser.parse_args()
    numbers = range(arguments.inputs)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    for target in TARGETS if arguments.target == "all" else [arguments.target]:
        try:
            result = fuzz(
                target, numbers, arguments.seed, time_limit=_TIME_LIMIT, tell=sys.stdout.write
            )
        except Finding as finding:
            arguments.failures.mkdir(parents=True, exist_ok=True)
            path = arguments.failures / f"{target}-{arguments.seed}-{finding.number}.msgpack"
            path.write_bytes(finding.data)
            print(f"{finding}\nsaved as {path}; again:\n    {finding.command}")
            raise finding from finding.__cause__
        print(result, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
