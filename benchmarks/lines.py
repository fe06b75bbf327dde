"""Count mcinfer's lines of Python by room, and the core's modules that name cards or ranks.

    python benchmarks/lines.py

Every line counts: code, docstrings, comments and empty lines. `mcinfer.cards` and `mcinfer.ranks` are rooms
that the core enters through one function each, which it imports lazily. So this lists the core's import
statements of them, also those within functions, and in how many of its modules the words stand at all.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ROOMS = {
    "cards": (["cards"], 2_400),
    "ranks": (["ranks"], 5_500),
    "facades": (["ort", "mslite", "exporters", "diffusers.py", "ray.py", "parallel.py"], 5_000),
    "serve": (["serve"], 1_500),
    "bench and cli": (["bench", "cli"], 5_500),
}
"""By name, the folders and modules of the package, and the most lines. The core is what is in none."""

MOST_CORE, MOST_TESTS = 14_000, 36_000


def lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    package = ROOT / "mcinfer"
    core, rooms = sorted(package.rglob("*.py")), {}
    for name, (places, most) in ROOMS.items():
        inside = [f for f in core if f.relative_to(package).parts[0] in places]
        core = [f for f in core if f not in inside]
        rooms[name] = inside, most
    rooms = {"core": (core, MOST_CORE), **rooms}
    rooms["tests"] = [*(ROOT / "tests").rglob("*.py")], MOST_TESTS
    print(f"{'room':14}{'lines':>8}{'at most':>9}{'modules':>9}")
    for name, (files, most) in rooms.items():
        print(f"{name:14}{lines(files):8,}{most:9,}{len(files):9}")
    for room in ("cards", "ranks"):
        statement = re.compile(
            rf"^ *(?:from|import) mcinfer\.{room}\b.*|^ *from mcinfer import {room}\b", re.M
        )
        texts = {f.relative_to(ROOT): f.read_text(encoding="utf-8") for f in core}
        found = [
            f"  {f}: {s.strip()}" for f, text in texts.items() for s in statement.findall(text)
        ]
        naming = sum(bool(re.search(rf"\b{room[:-1]}s?\b", text, re.I)) for text in texts.values())
        print(
            f"\nThe core imports {room} in {len(found)} statements, and names them in {naming} modules:"
        )
        print(*found, sep="\n")


if __name__ == "__main__":
    main()
