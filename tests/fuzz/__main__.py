"""Fuzz for as long as asked: ``python -m tests.fuzz --target all --inputs 1000000 --seed 0``."""

import argparse
import time

from tests.fuzz.fuzzing import TARGETS, fuzz

_PIECE = 100_000

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--only", type=int, help="the number of one input, as a failure gives it")
arguments = parser.parse_args()
inputs = range(arguments.inputs)
if arguments.only is not None:
    inputs = range(arguments.only, arguments.only + 1)
for name in TARGETS if arguments.target == "all" else [arguments.target]:
    for start in range(0, len(inputs), _PIECE):
        piece, began = inputs[start : start + _PIECE], time.monotonic()
        outcomes = fuzz(name, piece, arguments.seed, time_limit=10.0)
        counts = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
        seconds = time.monotonic() - began
        print(f"{name}: {len(piece)} inputs in {seconds:.1f} s: {counts}", flush=True)
