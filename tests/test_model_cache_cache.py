"""Tests of mcinfer/model_cache/cache.py and what it is made of: entries, locks, eviction."""

import fcntl
import grp
import json
import mmap
import os
import pwd
import re
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import mcinfer.model_cache.cache
import mcinfer.private
from mcinfer.errors import InvalidInputError
from mcinfer.model_cache import file_states
from mcinfer.model_cache.cache import Cache, CacheUnusableError, Held, entry_key
from tests.interrupts import interrupted_anywhere
from tests.process.waiting import wait_until

FACTS: dict[str, Any] = {"model": "abc", "options": {"threads": 2}}
KEY = entry_key(FACTS)
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 2**40)


def fill(folder: Path, lock: int) -> None:
    assert lock >= 0
    (folder / "model.onnx").write_bytes(b"graph")
    (folder / "weights.bin").write_bytes(WEIGHTS)
    (folder / "rank1" / "segment0").mkdir(parents=True)
    (folder / "rank1").chmod(0o775)  # as under a umask of 002
    (folder / "rank1" / "segment0" / "weights.bin").write_bytes(WEIGHTS)


def fill_not(folder: Path, lock: int) -> None:
    raise AssertionError(f"made again in {folder} under {lock}")


def make(cache: Cache, facts: Mapping[str, Any] = FACTS) -> Held:
    return cache.make(facts, fill, wait=0)


def make_and_let_go(cache: Cache, facts: Mapping[str, Any] = FACTS) -> Path:
    with closing(make(cache, facts)) as held:
        return held.folder


def notes(cache: Cache) -> Path:
    """The folder of remembered digests, by its visible path."""
    return cache.notes("sources")


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def locked(cache: Cache, key: str, kind: int) -> Iterator[None]:
    """What another process does: a lock through a descriptor of its own."""
    fd = os.open(cache.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_key_is_the_same_whatever_the_order_and_after_json(cache: Cache) -> None:
    facts = {"a": [None, 0.1, "ä"], "b": {"y": True, "x": 2**70}}
    key = entry_key(facts)
    assert re.fullmatch("[0-9a-f]{32}", key)
    assert entry_key({"b": {"x": 2**70, "y": True}, "a": facts["a"]}) == key
    assert entry_key(json.loads(json.dumps(facts))) == key
    assert entry_key({2: "", 10: ""}) == entry_key({"10": "", "2": ""})  # type: ignore[dict-item]
    assert entry_key({**facts, "and": "more"}) != key
    for bad in ("", "../etc", KEY.upper(), KEY + "\n", KEY[:-1]):
        with pytest.raises(InvalidInputError, match="key: got"):
            cache.open(bad)


def test_entry_is_made_once_for_its_owner_only_and_opened_as_it_was_made(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "above" / "cache", 2**40)
    assert cache.open(KEY) is None
    assert not cache.folder.exists()
    with closing(make(cache)) as made:
        assert (made.folder, made.key, made.facts) == (cache.folder / KEY, KEY, FACTS)
        with closing(cache.make(FACTS, fill_not, wait=0)) as again:
            assert again.folder == made.folder
    opened = cache.open(KEY)
    assert opened is not None
    with closing(opened):
        assert opened.facts == FACTS
        assert names(opened.folder) == ["manifest.json", "model.onnx", "rank1", "weights.bin"]
        assert (opened.folder / "rank1" / "segment0" / "weights.bin").read_bytes() == WEIGHTS
        assert mode(cache.folder.parent) == mode(cache.folder) == mode(opened.folder) == 0o700
        made_of = [*opened.folder.rglob("*")]
        assert {(path.is_dir(), mode(path)) for path in made_of} == {(True, 0o700), (False, 0o400)}
    assert cache.open(entry_key({})) is None
    assert names(cache.folder) == [KEY, f"{KEY}.lock"]


def test_what_fill_raises_passes_and_leaves_no_entry(cache: Cache) -> None:
    def fail(folder: Path, lock: int) -> None:
        fill(folder, lock)
        raise KeyboardInterrupt

    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        cache.make(FACTS, fail, wait=0)
    assert descriptors() == before
    assert names(cache.folder) == [f"{KEY}.lock"]
    assert cache.open(KEY) is None
    make_and_let_go(cache)


def rewrite(path: Path, content: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)


def damage_a_byte(folder: Path) -> None:
    path = folder / "weights.bin"
    before = path.stat()
    rewrite(path, WEIGHTS[:5000] + b"?" + WEIGHTS[5001:])

    def clock_has_ticked() -> bool:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return path.stat().st_ctime_ns != before.st_ctime_ns

    wait_until(clock_has_ticked)  # the clock of ctime is a coarse one
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def change_manifest(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    rewrite(folder / "manifest.json", json.dumps({**manifest, **changes}).encode())


def replace_by_link(path: Path, place: Path) -> None:
    target = path.rename(place / "elsewhere")
    path.symlink_to(target)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte": (damage_a_byte, "weights.bin has the SHA-256"),
    "truncated": (lambda f: os.truncate(f / "weights.bin", 100), "has 100 bytes, expected 10240"),
    "unknown": (lambda f: (f / "more").touch(), r"unknown files: \['more'\]"),
    "link": (
        lambda f: replace_by_link(f / "weights.bin", f.parent),
        "weights.bin has",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
    "facts": (lambda f: change_manifest(f, facts={"model": "b"}), f"expected {KEY}"),
    "files": (
        lambda f: change_manifest(f, files=[{"name": "model.onnx"}]),
        "is not a manifest: 'size_bytes'",
    ),
    "truncated in a folder": (
        lambda f: os.truncate(f / "rank1" / "segment0" / "weights.bin", 100),
        "rank1/segment0/weights.bin has 100 bytes",
    ),
    "link for a folder": (
        lambda f: replace_by_link(f / "rank1", f.parent),
        r"missing files: .* unknown files: \['rank1'\]",
    ),
    "garbage": (lambda f: rewrite(f / "manifest.json", b"\xff{"), "is not a manifest"),
}


@pytest.mark.parametrize(("damage", "text"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_entry_is_not_opened_and_made_again(
    cache: Cache, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], text: str
) -> None:
    folder = make_and_let_go(cache)
    damage(folder)
    before = descriptors()
    assert cache.open(KEY) is None
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("mcinfer.model_cache", "WARNING")
    assert re.search(text, record.getMessage())
    assert [info.key for info in cache.entries()] == [KEY]
    with closing(make(cache)) as held:
        assert (held.folder / "weights.bin").read_bytes() == WEIGHTS
        assert cache.entries()[0].bytes >= 2 * len(WEIGHTS)
        cache.make(FACTS, fill_not, wait=0).close()
    assert descriptors() == before
    assert {*names(cache.folder)} - {"elsewhere"} == {KEY, f"{KEY}.lock"}


def test_files_are_read_again_only_where_their_stamps_changed_which_is_recorded(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_and_let_go(cache)
    shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    folder.with_name("copy").rename(folder)
    read: list[str] = []
    whole = Path.open

    def watch(path: Path, *arguments: Any, **options: Any) -> Any:
        if options or arguments == ("rb",):
            read.append(path.name)
        return whole(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", watch)
    cache.make(FACTS, fill_not, wait=0).close()
    assert {"model.onnx", "weights.bin"} <= {*read}
    assert mode(folder / "manifest.json") == 0o400
    assert names(cache.folder) == [KEY, f"{KEY}.lock"]
    read.clear()
    cache.make(FACTS, fill_not, wait=0).close()
    assert not {"model.onnx", "weights.bin"} & {*read}
    os.utime(folder / "weights.bin", (0, 0))
    cache.make(FACTS, fill_not, wait=0).close()
    assert "weights.bin" in read
    assert "model.onnx" not in read


USES: list[Callable[[Cache], object]] = [
    make,
    Cache.entries,
    Cache.clear,
    Cache.evict,
    lambda cache: cache.open(KEY),
    notes,
]


def test_folder_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    for place, text in (
        ("file/cache", "Not a directory"),
        ("file", "Not a directory|File exists"),
        ("open", r"(is writable by others|others can change).* 0770\)"),
    ):
        folder = tmp_path / place
        for use in USES:
            with pytest.raises(CacheUnusableError, match=text) as failure:
                use(Cache(folder, 100))
            assert str(folder) in str(failure.value)


def test_damaged_entry_that_is_in_use_stays(cache: Cache) -> None:
    with closing(make(cache)) as held:
        damage_a_byte(held.folder)
        with pytest.raises(CacheUnusableError, match="using a damaged one"):
            cache.make(FACTS, fill_not, wait=0.02)
        assert "weights.bin" in names(held.folder)
    make_and_let_go(cache)


def test_lock_that_was_removed_before_it_was_taken_is_taken_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.folder.mkdir(0o700)
    path = cache.folder / f"{KEY}.lock"
    lock = fcntl.flock
    removed: list[int] = []

    def lock_late(fd: int, kind: int) -> None:
        if not removed:
            removed.append(os.fstat(fd).st_ino)
            path.unlink()
        lock(fd, kind)

    def fill_and_look(folder: Path, lock: int) -> None:
        fill(folder, lock)
        assert removed
        assert os.path.samestat(os.fstat(lock), path.stat())

    monkeypatch.setattr(fcntl, "flock", lock_late)
    with closing(cache.make(FACTS, fill_and_look, wait=5)) as held:
        assert os.path.samestat(os.fstat(held.lock), path.stat())


def three_entries(cache: Cache) -> list[str]:
    """Keys of entries of one size, the least recently used first."""
    keys = []
    for i in (2, 0, 1):
        make_and_let_go(cache, {"number": i})
        keys.append(entry_key({"number": i}))
        os.utime(cache.folder / f"{keys[-1]}.lock", (1000.0 + len(keys),) * 2)
    return keys


def test_least_recently_used_entries_are_evicted_first_and_those_in_use_stay_and_count(
    cache: Cache,
) -> None:
    keys = three_entries(cache)
    size = cache.entries()[0].bytes
    assert Cache(cache.folder, 3 * size).evict() == 0
    assert Cache(cache.folder, 3 * size - 1).evict() == size
    assert [info.key for info in cache.entries()] == keys[1:]
    with locked(cache, keys[1], fcntl.LOCK_SH):
        assert Cache(cache.folder, size).evict() == size
    assert names(cache.folder) == [keys[1], f"{keys[1]}.lock"]
    with closing(make(Cache(cache.folder, 1))) as held:  # not what was just made
        assert [info.key for info in cache.entries()] == [KEY]
        assert (held.folder / "weights.bin").exists()


def test_thirty_versions_stay_below_the_limit_and_those_of_models_that_are_gone_go_first(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path / "cache", 10 * 4 * len(WEIGHTS))
    model = tmp_path / "model.onnx"
    long_ago = time.time() - 8 * 86400.0
    kept: list[Held] = []
    for version in range(30):
        model.write_bytes(WEIGHTS[version:])
        states = file_states([str(model)])

        def fill_version(folder: Path, lock: int, states: Any = states) -> None:
            fill(folder, lock)
            (folder / "about.json").write_text(json.dumps({"files": states}))

        held = cache.make({"version": version}, fill_version, wait=0)
        if version == 0:
            kept.append(held)  # in use
        else:
            held.close()
        assert sum(info.bytes for info in cache.entries()) <= cache.limit_bytes
    left = [info.facts["version"] for info in cache.entries()]
    assert left[0] == 0
    assert left[1:] == [*range(30 - len(left) + 1, 30)]
    # The last one's model is there as it was; it was unused for longest, and stays the longest.
    for version in left[1:]:
        os.utime(
            cache.folder / f"{entry_key({'version': version})}.lock", (long_ago + version,) * 2
        )
    os.utime(cache.folder / f"{entry_key({'version': 29})}.lock", (long_ago, long_ago))
    cache = Cache(cache.folder, 2 * cache.entries()[-1].bytes)
    cache.evict()
    assert [info.facts["version"] for info in cache.entries()] == [29, 0]
    kept[0].close()


def test_limit_is_a_part_of_the_disk_unless_it_is_given(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "missing" / "cache")
    assert 0 < cache.limit_bytes <= shutil.disk_usage(tmp_path).total // 4
    assert cache.limit_bytes <= 50 * 2**30
    assert Cache(tmp_path, 7).limit_bytes == 7


def test_claim_belongs_to_one_and_a_failure_keeps_others_from_trying_for_an_hour(
    cache: Cache,
) -> None:
    claim, why = cache.claim(KEY)
    assert claim is not None
    assert not why
    assert cache.claim(KEY) == (None, "")
    cache.settle(KEY, "no room")
    assert cache.claim(KEY) == (None, "no room")  # also while a process that was forked has it
    os.close(claim)
    assert cache.claim(KEY) == (None, "no room")
    place = cache.folder / "background" / KEY
    for moved in (-3601.0, 3601.0):
        os.utime(place, (time.time() + moved,) * 2)
        claim, _ = cache.claim(KEY)
        assert claim is not None
        os.close(claim)
    claim, _ = cache.claim(KEY)
    assert claim is not None
    cache.settle(KEY)
    os.close(claim)
    assert not place.exists()


def test_users_are_the_processes_that_map_an_entry(cache: Cache) -> None:
    with closing(make(cache)) as held, (held.folder / "weights.bin").open("rb") as file:
        assert cache.users() == {}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert cache.users() == {KEY: [os.getpid()]}


def test_clear_removes_unused_entries_and_the_digests_of_sources(cache: Cache) -> None:
    assert cache.clear() == (0, 0)
    keys = three_entries(cache)
    size = cache.entries()[0].bytes
    (notes(cache) / "digest").touch()
    cache.evict()
    assert names(notes(cache)) == ["digest"]
    with locked(cache, keys[1], fcntl.LOCK_SH):
        assert cache.clear() == (2 * size, 1)
    assert names(cache.folder) == sorted([keys[1], f"{keys[1]}.lock", "sources"])
    assert cache.clear() == (size, 0)
    assert names(cache.folder) == ["sources"]
    assert names(notes(cache)) == []
    assert mode(notes(cache)) == 0o700


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder for the cache to lie in, which others may change."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


OTHERS_CAN = r"others can change \S+/shared"


def test_cache_below_a_folder_that_others_can_change_is_not_used(shared: Path) -> None:
    cache = Cache(shared / "cache", 0)
    cache.folder.mkdir(0o700)
    shared.chmod(0o1777)
    assert cache.open(KEY) is None
    assert notes(cache).is_dir()
    for bits in (0o777, 0o757):
        shared.chmod(bits)
        text = f"{OTHERS_CAN} .*mode {bits:04o}.*chmod go-w.*MCINFER_CACHE"
        for use in (lambda: cache.open(KEY), lambda: notes(cache), lambda: make(cache)):
            with pytest.raises(CacheUnusableError, match=text):
                use()


@contextmanager
def group_is(folder: Path, name: str, members: list[str], others_gid: int) -> Iterator[None]:
    """The group of a folder is this user's first one, and like this; another user has another one or not."""
    gid = folder.stat().st_gid
    me = pwd.struct_passwd(("me", "x", os.geteuid(), gid, "", "/", ""))
    other = pwd.struct_passwd(("other", "x", os.geteuid() + 1, gid + others_gid, "", "/", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pwd, "getpwuid", {os.geteuid(): me}.__getitem__)
        patch.setattr(pwd, "getpwall", lambda: [me, other])
        patch.setattr(
            grp, "getgrgid", {gid: grp.struct_group((name, "x", gid, members))}.__getitem__
        )
        yield


@pytest.mark.parametrize(
    ("name", "members", "others_gid", "usable"),
    [
        ("me", [], 1, True),
        ("me", ["me"], 1, True),
        ("me", ["me", "other"], 1, False),
        ("me", [], 0, False),  # another user's first group
        ("staff", [], 1, False),
        ("access list", [], 1, False),
    ],
)
def test_cache_below_a_folder_that_a_group_can_change_is_used_where_the_group_is_private(
    shared: Path, name: str, members: list[str], others_gid: int, usable: bool
) -> None:
    shared.chmod(0o775)
    if name == "access list":
        # u::rwx, u:12345:rwx, g::---, m::rwx, o::--- (acl(5)): the mode says 0770
        entries = [(1, 7, -1), (2, 7, 12345), (4, 0, -1), (16, 7, -1), (32, 0, -1)]
        content = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        try:
            os.setxattr(shared, "system.posix_acl_access", content)
        except OSError as exc:
            pytest.skip(f"no access lists here: {exc}")
        assert mode(shared) == 0o770
        name = "me"
    refused = pytest.raises(CacheUnusableError, match=OTHERS_CAN)
    with group_is(shared, name, members, others_gid), nullcontext() if usable else refused:
        assert notes(Cache(shared / "cache", 0)).is_dir()


def test_open_finds_a_sound_entry_while_others_look_whether_it_is_in_use(cache: Cache) -> None:
    make_and_let_go(cache)
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            cache.entries()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(60):
            held = cache.open(KEY)
            assert held is not None
            held.close()
    finally:
        done.set()
        looking.join()


def test_open_that_a_signals_handler_ends_anywhere_holds_nothing(cache: Cache) -> None:
    make_and_let_go(cache)
    before = descriptors()
    held: list[Held | None] = []
    for _ in interrupted_anywhere(
        lambda: held.append(cache.open(KEY)), mcinfer.model_cache.cache, mcinfer.private
    ):
        assert descriptors() == before
    assert held


def test_sweep_removes_what_crashes_left_but_not_what_is_locked(cache: Cache) -> None:
    cache.folder.mkdir(0o700)
    others = [entry_key({"number": i}) for i in range(3)]
    for key in others[:2]:
        (cache.folder / f"tmp-{key}-abcd").mkdir()
        (cache.folder / f"tmp-{key}-abcd" / "weights.bin").write_bytes(WEIGHTS)
    (cache.folder / f"{others[2]}.lock").touch()
    (cache.folder / "tmp-mine").mkdir()
    with locked(cache, others[0], fcntl.LOCK_EX):
        cache.evict()
        left = {f"tmp-{others[0]}-abcd", f"{others[0]}.lock", "tmp-mine"}
        assert {*names(cache.folder)} == left
        assert names(cache.folder / f"tmp-{others[0]}-abcd") == ["weights.bin"]
    cache.evict()
    assert names(cache.folder) == ["tmp-mine"]


def test_folder_and_limit_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("MCINFER_CACHE_LIMIT", raising=False)
    for own, xdg, folder in (
        ("/a/b", "/c", "/a/b"),
        ("", "/c", "/c/mcinfer"),
        ("", "relative", "/home/me/.cache/mcinfer"),
    ):
        monkeypatch.setenv("MCINFER_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        cache = Cache.default()
        assert cache.folder == Path(folder)
        disk = shutil.disk_usage("/")
        assert 0 < cache.limit_bytes <= min(50 * 2**30, disk.total // 4)
    for text, limit_bytes in (("0", 0), ("500M", 500 * 2**20), ("20 GB", 20 * 2**30)):
        monkeypatch.setenv("MCINFER_CACHE_LIMIT", text)
        assert Cache.default().limit_bytes == limit_bytes
    for text in ("-1", "20 X", "G", "1.5G", "20GX", "1e9", "٣", "9" * 5000):
        monkeypatch.setenv("MCINFER_CACHE_LIMIT", text)
        with pytest.raises(InvalidInputError, match="MCINFER_CACHE_LIMIT: got"):
            Cache.default()


def sent(held: Held) -> tuple[Path, int]:
    """What another process would have received."""
    lock = os.dup(held.lock)
    os.set_inheritable(lock, True)
    return held.folder, lock


def test_adopted_entry_is_held_on_its_own(cache: Cache) -> None:
    before = descriptors()
    held = make(cache)
    adopted = Held.adopt(*sent(held))
    held.close()
    assert (adopted.folder, adopted.key, adopted.facts) == (cache.folder / KEY, KEY, FACTS)
    assert not os.get_inheritable(adopted.lock)
    assert cache.clear() == (0, 1)
    for _ in range(2):
        adopted.close()
    assert (adopted.lock, descriptors()) == (-1, before)
    assert cache.clear()[1] == 0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda held: shutil.rmtree(held.folder), "not visible here, .* mount it at the same path"),
        (lambda held: damage_a_byte(held.folder), "weights.bin has the SHA-256"),
        (lambda held: held.folder.parent.chmod(0o777), "others can change"),
        (lambda held: (held.folder.parent / f"{KEY}.lock").unlink(), "or is another one"),
    ],
)
def test_entry_that_cannot_be_adopted_says_why_and_leaves_no_descriptor(
    cache: Cache, spoil: Callable[[Held], object], text: str
) -> None:
    with closing(make(cache)) as held:
        before = descriptors()
        received = sent(held)
        spoil(held)
        with pytest.raises(CacheUnusableError, match=text):
            Held.adopt(*received)
        assert descriptors() == before
