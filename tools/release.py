"""Build a release into dist/, twice, and try it out: ``make release``. Nothing is uploaded or tagged.

    python tools/release.py PYTHON   # one that has the packages build and twine

What is built is the last commit, so there must be no other changes. docs/releasing.md says what comes next.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "REPOSITORY_URL"
LEFT_OUT = {".ci/run", ".gitignore"}
"""Tracked files that are not in the sdist."""

EXAMPLE = re.compile(r"## First example\n.*?```python\n(.*?)```.*?```text\n(.*?)```", re.DOTALL)


def main() -> None:
    [python] = map(os.path.abspath, sys.argv[1:])
    os.umask(0o022)  # the modes of files are in the wheel
    version, readme = read_version(), (ROOT / "README.md").read_text("utf-8")
    check_sources(version)
    with TemporaryDirectory() as folder:
        first, second = (build(python, Path(folder, name)) for name in ("first", "second"))
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in first}
        for path in second:
            if hashlib.sha256(path.read_bytes()).hexdigest() != sums[path.name]:
                fail(f"two builds of {path.name} differ")
        say("two builds have the same bytes")
        check_contents(*first, version)
        run(python, "-m", "twine", "check", "--strict", *first)
        say("twine accepts the metadata")
        for path in first:
            try_out(path, version, readme)
        collect_tests(first[0], Path(folder, "unpacked"))
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        for path in first:
            (ROOT / "dist").mkdir(exist_ok=True)
            shutil.copy(path, ROOT / "dist")
    if PLACEHOLDER in readme:
        say(f"warning: README.md still has {PLACEHOLDER} where the repository's address belongs")
    print(*(f"{digest}  dist/{name}" for name, digest in sums.items()), sep="\n")


def read_version() -> str:
    text = (ROOT / "mcinfer" / "__init__.py").read_text("utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(version)


def check_sources(version: str) -> None:
    """Whether all is committed, the changelog has the version, and no other file says it."""
    if changes := run("git", "status", "--porcelain"):
        fail(f"there are changes that are not committed:\n{changes}")
    tag = f"v{version}"
    if run("git", "tag", "--list", tag) and tag not in run("git", "tag", "--points-at").split():
        fail(f"the tag {tag} is there, at another commit: raise mcinfer.__version__")
    section = rf"^## {re.escape(version)}, \d{{4}}-\d\d-\d\d\n+(?!## )\S"
    if not re.search(section, (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
        fail(f"CHANGELOG.md has no section '## {version}, YYYY-MM-DD', or it is empty")
    named = rf"mcinfer\W{{0,3}}{re.escape(version)}"
    for name in run("git", "ls-files").splitlines():
        text = (ROOT / name).read_bytes().decode(errors="replace")
        if name != "CHANGELOG.md" and re.search(named, text):
            fail(f"{name} has the version {version}, which belongs in mcinfer/__init__.py alone")
    say(f"mcinfer {version}: the changelog has it, and no other file but mcinfer/__init__.py")


def build(python: str, folder: Path) -> tuple[Path, Path]:
    """The sdist of the last commit, and the wheel that is built from the sdist."""
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    folder.mkdir()
    unpack_commit(folder / "source")
    command = (python, "-m", "build", f"--outdir={folder}", folder / "source")
    said = run(*command, SOURCE_DATE_EPOCH=epoch)
    refuse_deprecations(said)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    sdist.write_bytes(normalized(sdist, int(epoch)))
    used = re.findall(r"setuptools==\S+", said)
    say(f"built {sdist.name} and {wheel.name} with {used[-1]}")
    return sdist, wheel


def unpack_commit(folder: Path, repository: Path = ROOT) -> None:
    """The files of the last commit, without what a person's configuration of git makes of modes and lines."""
    archive = folder.with_suffix(".tar")
    configured = ("-c", "tar.umask=0022", "-c", "core.autocrlf=false")
    run("git", *configured, "archive", f"--output={archive}", "HEAD", cwd=repository)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def normalized(sdist: Path, epoch: int) -> bytes:
    """The same files in order, without owners and the times of the build, which setuptools writes down."""
    target = io.BytesIO()
    with (
        tarfile.open(sdist) as source,
        gzip.GzipFile("", "wb", mtime=epoch, fileobj=target) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.pax_headers = epoch, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            tar.addfile(member, source.extractfile(member) if member.isfile() else None)
    return target.getvalue()


def check_contents(sdist: Path, wheel: Path, version: str) -> None:
    """The sdist has the tracked files and its metadata, the wheel the package's files and its metadata."""
    tracked = {*run("git", "ls-files").splitlines()}
    with tarfile.open(sdist) as tar:
        packed = {
            m.name.removeprefix(f"mcinfer-{version}/") for m in tar.getmembers() if m.isfile()
        }
    made = {name for name in packed if name == "PKG-INFO" or name.startswith("mcinfer.egg-info/")}
    compare(sdist.name, packed - made, tracked - LEFT_OUT)
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if not n.startswith(f"mcinfer-{version}.dist-info/")}
    compare(wheel.name, names, {name for name in tracked if name.startswith("mcinfer/")})


def compare(what: str, found: set[str], expected: set[str]) -> None:
    if found != expected:
        fail(f"{what} lacks {sorted(expected - found)}, and has {sorted(found - expected)}")
    say(f"{what} has what it should, {len(found)} files")


def try_out(path: Path, version: str, readme: str) -> None:
    """Install it as a user does, and run README's first example and the doctor, far from this folder."""
    [(program, printed)] = EXAMPLE.findall(readme)
    with TemporaryDirectory() as scratch:
        run(sys.executable, "-m", "venv", "env", cwd=scratch)
        installed = Path(scratch, "env", "bin")
        log = run(installed / "python", "-m", "pip", "install", "-v", f"{path}[cpu,cli]")
        refuse_deprecations(log)
        here = {"cwd": scratch, "MCINFER_CACHE": f"{scratch}/cache"}
        Path(scratch, "example.py").write_text(program, "utf-8")
        if (said := run(installed / "python", "example.py", **here)) != printed:
            fail(f"README's first example printed\n{said}")
        if (said := run(installed / "mcinfer", "--version", **here)) != f"mcinfer {version}\n":
            fail(f"mcinfer --version printed {said}")
        run(installed / "mcinfer", "doctor", **here)
    say(f"{path.name}: installed, README's first example and mcinfer doctor ran")


def collect_tests(sdist: Path, folder: Path) -> None:
    """The tests of the unpacked sdist can be imported, so the sdist has what they need for that."""
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    [unpacked] = folder.iterdir()
    options = ("--collect-only", "-qq", "-p", "no:cacheprovider", "-m", "")
    said = run(sys.executable, "-m", "pytest", *options, cwd=unpacked, PYTHONPATH=unpacked)
    say(f"{sdist.name}: pytest collects its tests, in {len(said.strip().splitlines())} files")


def refuse_deprecations(said: str) -> None:
    if lines := [line for line in said.splitlines() if "Deprecat" in line]:
        fail("\n".join(["setuptools or pip warns:", *lines]))


def run(*command: str | Path, cwd: str | Path = ROOT, **variables: str | Path) -> str:
    """What a program prints, warnings too; `variables` replace those of Python and of mcinfer."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "MCINFER_"))}
    environment = {**kept, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        fail(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def fail(text: str) -> NoReturn:
    sys.exit(f"release: {text}")


if __name__ == "__main__":
    main()
