"""Tests of mcinfer/private.py: who may have a part in the folders and files that mcinfer makes."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mcinfer.private import (
    IN_MEMORY,
    Descriptor,
    ModelInMemory,
    OthersError,
    PrivateFolder,
    in_words,
    inherited,
    opened_folder,
    opened_place,
)

OTHER_USER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """An empty place of first choice; the second one is `second`."""
    place = tmp_path / "first"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture(autouse=True)
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "second"
    place.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def chosen(first: Path) -> Path:
    with PrivateFolder(str(first)) as folder:
        return folder.place


def test_folder_is_for_its_owner_only_and_goes_at_its_end_with_all_that_is_in_it(
    first: Path,
) -> None:
    with PrivateFolder(str(first)) as folder:
        (path,) = first.iterdir()
        assert folder.path == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert os.path.samestat(path.stat(), folder.opened.stat())
        (folder.opened / "deep").mkdir()
        (folder.opened / "deep" / "weights").write_bytes(b"w")
        with PrivateFolder(str(first)):
            assert len([*first.iterdir()]) == 2
    assert [*first.iterdir()] == []


# Where it lies.


SAFE = {0o777: False, 0o702: False, 0o755: True, 0o1777: True}


@pytest.mark.parametrize(("mode", "safe"), SAFE.items())
@pytest.mark.parametrize("where", ["here", "above"])
def test_place_where_others_can_rename_what_is_mine_is_passed_over(
    first: Path, second: Path, mode: int, safe: bool, where: str
) -> None:
    place = first if where == "here" else first / "within"
    place.mkdir(exist_ok=True)
    first.chmod(mode)
    assert chosen(place) == (place if safe else second)


@AS_ROOT
def test_place_of_another_user_or_behind_a_link_of_one_is_passed_over(
    first: Path, second: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(first)
    assert chosen(link) == link
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert chosen(link) == second
    os.chown(first, OTHER_USER, OTHER_USER)
    assert chosen(first) == second


@pytest.mark.parametrize("given", [None, ""])
def test_without_a_first_choice_the_temporary_folder_serves(
    second: Path, given: str | None
) -> None:
    with PrivateFolder(given) as folder:
        assert folder.place == second


def test_no_place_at_all_is_an_os_error_that_says_of_each_why(
    monkeypatch: pytest.MonkeyPatch, first: Path, second: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    second.chmod(0o777)
    with pytest.raises(PermissionError) as caught:
        PrivateFolder(str(first))
    text = str(caught.value)
    assert f"{first}: Permission denied; {second}: others can change {second} (user" in text
    assert "mode 0777" in text
    assert [*first.iterdir()] == []


# What a killed process leaves.

OWNER = """
import os, sys
from mcinfer.private import PrivateFolder
folder = PrivateFolder(sys.argv[1])
(folder.opened / "weights").write_bytes(b"w")
print(flush=True)
sys.stdin.read()
"""


def owner(place: Path) -> "subprocess.Popen[bytes]":
    """A process that has a private folder there."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(place)], stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_folder_of_a_killed_process_is_removed_by_the_next_one(first: Path, end: int) -> None:
    with owner(first) as process:
        (theirs,) = first.iterdir()
        with PrivateFolder(str(first)):
            assert (theirs / "weights").exists()  # its owner lives
        process.send_signal(end)
    with PrivateFolder(str(first)) as folder:
        assert [*first.iterdir()] == [Path(folder.path)]


def test_folder_stays_while_a_forked_child_of_its_owner_lives_and_goes_with_its_owner(
    first: Path,
) -> None:
    with PrivateFolder(str(first)) as folder:
        child = os.fork()
        if child == 0:
            folder.close()
            os._exit(0 if os.path.exists(folder.path) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert [*first.iterdir()] == [Path(folder.path)]
    assert [*first.iterdir()] == []


def test_sweep_leaves_what_is_not_a_private_folder_of_this_user(first: Path) -> None:
    names = ["mcinfer-model", "mcinfer-0123", "other", f"mcinfer-{'0' * 16}"]
    for name in names[:3]:
        (first / name).mkdir()
    if os.geteuid() == 0:
        (first / names[3]).mkdir()
        os.chown(first / names[3], OTHER_USER, OTHER_USER)
    left = sorted(os.listdir(first))
    (first / f"mcinfer-{'1' * 16}").symlink_to(first / "other")
    with PrivateFolder(str(first)):
        pass
    assert sorted(os.listdir(first)) == sorted([*left, f"mcinfer-{'1' * 16}"])


def test_folder_that_another_process_sweeps_before_it_is_locked_is_made_again(
    monkeypatch: pytest.MonkeyPatch, first: Path
) -> None:
    flock = fcntl.flock
    swept: list[str] = []

    def sweep_first(fd: int, kind: int) -> None:
        if not swept:
            swept.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.rmdir(swept[0])
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    with PrivateFolder(str(first)) as folder:
        assert [*first.iterdir()] == [Path(folder.path)] != [Path(swept[0])]


# Folders and files that are there, or that users name.


def test_folder_is_found_through_links_and_made_with_those_above(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far/../far/deep")
    with opened_folder(tmp_path / "near" / "er", make=0o700) as folder:
        assert folder.readlink() == tmp_path / "far" / "deep" / "er"
    assert stat.S_IMODE((tmp_path / "far" / "deep").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    faults = {"none": "ENOENT", "file": "ENOTDIR", "file/x": "ENOTDIR", "loop": "ELOOP"}
    for name, number in ((name, getattr(errno, fault)) for name, fault in faults.items()):
        with pytest.raises(OSError, match=os.strerror(number)), opened_folder(tmp_path / name):
            pass


@pytest.mark.parametrize("name", ["new", "old", "link", "dangling", "folder"])
def test_place_is_at_the_end_of_all_links(tmp_path: Path, name: str) -> None:
    far = tmp_path / "far"
    (far / "folder").mkdir(parents=True)
    (far / "old").touch()
    (tmp_path / "near").symlink_to("far")
    (far / "link").symlink_to("../near/old")
    (far / "dangling").symlink_to(far / "new")
    with opened_place(tmp_path / "near" / name) as place:
        ends = {"link": "old", "dangling": "new"}
        assert place.parent.readlink() / place.name == far / ends.get(name, name)


@AS_ROOT
@pytest.mark.parametrize("path", ["theirs", "theirs/x", "mine/x", "mine"])
@pytest.mark.parametrize("opened", [opened_place, lambda path: opened_folder(path, guarded=False)])
def test_links_of_other_users_are_not_followed(tmp_path: Path, path: str, opened: object) -> None:
    (tmp_path / "far" / "x").mkdir(parents=True)
    theirs = tmp_path / "theirs"
    theirs.symlink_to("far")
    (tmp_path / "mine").symlink_to("theirs")
    assert callable(opened)
    with opened(tmp_path / path):
        pass
    os.chown(theirs, OTHER_USER, -1, follow_symlinks=False)
    text = f"^{theirs} is a link of another user$"
    with pytest.raises(OthersError, match=text), opened(tmp_path / path):
        pass


# Models in memory.


def test_model_in_memory_has_no_name_and_nothing_changes_it() -> None:
    with closing(ModelInMemory(b"model")) as model:
        (fd,) = inherited(model.path)
        assert Path(model.path).read_bytes() == b"model"
        assert not os.get_inheritable(fd)
        for mode in ("wb", "ab", "r+b"):
            with pytest.raises(PermissionError), open(model.path, mode) as file:
                file.write(b"other")
        assert Path(model.path).read_bytes() == b"model"
    assert not os.path.lexists(model.path)


def test_model_in_memory_is_at_no_descriptor_of_a_standard_stream() -> None:
    code = (
        "import os, sys\nos.closerange(0, 3)\n"
        "from mcinfer.private import ModelInMemory, inherited\n"
        "os._exit(inherited(ModelInMemory(b'x').path)[0])"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode >= 3


def test_texts_have_words_in_the_place_of_its_path() -> None:
    text = "/proc/self/fd/1: no model; /proc/self/fd/12 and /m.onnx"
    assert (
        in_words(text, "/proc/self/fd/1") == f"{IN_MEMORY}: no model; /proc/self/fd/12 and /m.onnx"
    )
    assert in_words(text, "/m.onnx") == text
    assert inherited("/m.onnx") == ()


# Descriptors.


@pytest.mark.parametrize("closes", [True, False])
def test_descriptor_that_the_program_has_closed_is_not_closed_again(closes: bool) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    descriptor = Descriptor(fd)
    os.close(fd)
    others = os.pipe()
    try:
        assert fd in others
        if closes:
            descriptor.close()
        del descriptor
        assert all(map(stat.S_ISFIFO, (os.fstat(other).st_mode for other in others)))
    finally:
        for other in others:
            os.close(other)
