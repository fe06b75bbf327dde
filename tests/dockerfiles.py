"""Dockerfiles: their instructions, and what they copy into an image."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction's name and what follows it, without comments, in one line."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    found = "\n".join(lines).replace("\\\n", "").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in found) if name]


def values(dockerfile: str, name: str) -> list[str]:
    """What follows each instruction of a name."""
    return [rest for found, rest in instructions(dockerfile) if found == name]


def command_of(dockerfile: str, name: str) -> list[str]:
    """The last command that an instruction has, or ``HEALTHCHECK … CMD``, as a list."""
    text = values(dockerfile, name)[-1]
    found = json.loads(text[text.index("[") :])
    assert isinstance(found, list)
    return found


def copies(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Each file or folder that is copied, and the folder that it comes into."""
    for step in values(dockerfile, "COPY"):
        *names, to = step.split()
        yield from ((name, to) for name in names)


def lay_out(dockerfile: str, image: Path, written: Mapping[str, str] | None = None) -> Path:
    """Copy what a Dockerfile copies, as .dockerignore leaves it, and build the package from that alone.

    Args:
        dockerfile: Its text. The package is built in its folder /src.
        image: A new folder.
        written: By name, texts of files that are not in the repository.

    Returns:
        The folder of the built package, for PYTHONPATH.
    """
    ignored = (ROOT / ".dockerignore").read_text("utf-8").replace("**/", "").split()
    not_sent = shutil.ignore_patterns(*ignored)
    for name, to in copies(dockerfile):
        assert not not_sent("", [name]), f"{name} is in .dockerignore"
        target = image / (to.lstrip("/") if to.startswith("/") else f"app/{to}")
        if written and name in written:
            target.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(written[name], encoding="utf-8")
        elif (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=not_sent)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    packages = image / "packages"
    build = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(packages)]
    subprocess.run(build, cwd=image / "src", check=True, timeout=50)
    assert (packages / "mcinfer" / "__init__.py").is_file()  # else that of ROOT would do
    return packages
