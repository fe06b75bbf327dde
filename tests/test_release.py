"""Tests of tools/release.py: what `make release` builds is the same each time, and has what it should."""

import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tools.release import EXAMPLE, ROOT, compare, normalized, refuse_deprecations


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
