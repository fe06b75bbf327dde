"""Tests of tools/release.py: what `make release` builds is the same each time, and has what it should."""

import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tools.release import (
    EXAMPLE,
    ROOT,
    compare,
    normalized,
    refuse_deprecations,
    unpack_commit,
)


def sdist(path: Path, time: float, user: str, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"mcinfer-1.0/{name}")
            member.mtime, member.uname, member.uid, member.size = time, user, len(user), len(name)
            tar.addfile(member, BytesIO(name.encode()))
    return path


def test_sdists_of_the_same_files_have_the_same_bytes(tmp_path: Path) -> None:
    first = normalized(sdist(tmp_path / "a.tar.gz", 1.5, "zaphod", ["setup.py", "README"]), 77)
    assert first == normalized(sdist(tmp_path / "b.tar.gz", 9, "ford", ["README", "setup.py"]), 77)
    with tarfile.open(fileobj=BytesIO(first)) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == ["mcinfer-1.0/README", "mcinfer-1.0/setup.py"]
        assert {(m.mtime, m.uid, m.uname) for m in members} == {(77, 0, "")}
        assert [file.read() for m in members if (file := tar.extractfile(m))] == [
            b"README",
            b"setup.py",
        ]


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_configuration_of_git_changes_neither_modes_nor_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "file").write_bytes(b"a\nb\n")
    person = ("-c", "user.name=zaphod", "-c", "user.email=zaphod@localhost")
    for command in (("init", "-q"), ("add", "file"), (*person, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *command], cwd=repository, check=True, timeout=50)
    for name, value in (("tar.umask", "0077"), ("core.autocrlf", "true")):
        subprocess.run(["git", "config", name, value], cwd=repository, check=True, timeout=50)
    unpack_commit(tmp_path / "source", repository)
    file = tmp_path / "source" / "file"
    assert file.read_bytes() == b"a\nb\n"
    assert file.stat().st_mode & 0o777 == 0o644


def test_wrong_contents_and_warnings_of_what_leaves_end_the_release() -> None:
    compare("it", {"a"}, {"a"})
    with pytest.raises(SystemExit, match=r"it lacks \['b'\], and has \['cache'\]"):
        compare("it", {"a", "cache"}, {"a", "b"})
    refuse_deprecations("copying mcinfer/errors.py")
    with pytest.raises(SystemExit, match="SetuptoolsDeprecationWarning: License"):
        refuse_deprecations("a\nSetuptoolsDeprecationWarning: License\nb")


def test_first_example_of_readme_is_found() -> None:
    [(program, printed)] = EXAMPLE.findall((ROOT / "README.md").read_text("utf-8"))
    compile(program, "README.md", "exec")
    assert printed.endswith("True\n")
