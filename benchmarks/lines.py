"""Count mcinfer's lines of Python by room, against the budget of each.

    python benchmarks/lines.py           # also the core's imports of cards and ranks
    python benchmarks/lines.py --check   # fails where a room is over its budget: `make check`

Every line counts: code, docstrings, comments and empty lines. The budgets are in lines.json beside this file,
at the numbers reached: a commit that needs more says why, and changes the number.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mcinfer"
BUDGETS = Path(__file__).with_suffix(".json")

OUTSIDE = {
    "cards": ["cards"],
    "ranks": ["ranks"],
    "facades": ["ort", "mslite", "exporters", "diffusers.py", "ray.py", "parallel.py"],
    "serve": ["serve"],
    "bench and cli": ["bench", "cli"],
}
"""By name, the folders and modules of the package that are not of the core."""

INSIDE = ("requests", "scheduler", "runtime", "worker", "master.py")
"""The parts of the core that have a budget of their own."""


def rooms() -> dict[str, list[Path]]:
    """The files of each room."""
    files = sorted(PACKAGE.rglob("*.py"))
    first = {file: file.relative_to(PACKAGE).parts[0] for file in files}
    outside = {n: [f for f in files if first[f] in places] for n, places in OUTSIDE.items()}
    core = [f for f in files if not any(first[f] in places for places in OUTSIDE.values())]
    return {
        "core": core,
        **{name: [f for f in core if first[f] == name] for name in INSIDE},
        **outside,
        "tests": [*(ROOT / "tests").rglob("*.py")],
        "benchmarks": [*(ROOT / "benchmarks").rglob("*.py")],
    }


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def check(counted: dict[str, int], budgets: dict[str, int]) -> int:
    """Exit status 1, and a line for each room over its budget."""
    over = [name for name, count in counted.items() if count > budgets[name]]
    for name in over:
        print(
            f"{name}: {counted[name]:,} lines of at most {budgets[name]:,}: delete some, or raise the "
            f"number in {BUDGETS.relative_to(ROOT)} and say why in the commit"
        )
    return 1 if over else 0


def show(files: dict[str, list[Path]], counted: dict[str, int], budgets: dict[str, int]) -> None:
    print(f"{'room':14}{'lines':>8}{'at most':>9}{'modules':>9}")
    for name, count in counted.items():
        print(f"{name:14}{count:8,}{budgets[name]:9,}{len(files[name]):9}")
    texts = {f.relative_to(ROOT): f.read_text(encoding="utf-8") for f in files["core"]}
    for room in ("cards", "ranks"):
        statement = re.compile(
            rf"^ *(?:from|import) mcinfer\.{room}\b.*|^ *from mcinfer import {room}\b", re.M
        )
        found = [
            f"  {f}: {s.strip()}" for f, text in texts.items() for s in statement.findall(text)
        ]
        naming = sum(bool(re.search(rf"\b{room[:-1]}s?\b", text, re.I)) for text in texts.values())
        head = f"The core imports {room} in {len(found)} statements, and names them in {naming} modules:"
        print("", head, *found, sep="\n")


def main() -> int:
    files = rooms()
    counted = {name: lines(found) for name, found in files.items()}
    budgets: dict[str, int] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    if sys.argv[1:] == ["--check"]:
        return check(counted, budgets)
    show(files, counted, budgets)
    return 0


if __name__ == "__main__":
    sys.exit(main())
