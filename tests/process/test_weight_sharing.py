"""Shared weights between real processes: who gets them, what the others are told, and what is left."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from mcinfer.errors import WeightAccessError
from mcinfer.model_cache.cache import Cache, Held, entry_key
from mcinfer.weight_sharing import WeightOwner, address, open_weights
from tests.process.scripts import Program
from tests.process.waiting import is_alive

FACTS = {"model": "a test's"}
CONTENT = "the graph"
OPENED = f"opened {CONTENT}"
OTHER_USER = 65534

# Without NumPy and the like: most of these tests' time is the start of such programs.
PREAMBLE = """
import os, resource, signal, socket, sys, time
from pathlib import Path
from mcinfer.errors import ClosedError, WeightAccessError
from mcinfer.model_cache.cache import Cache, entry_key
from mcinfer.process import start_time
from mcinfer.weight_sharing import address
from mcinfer.weight_sharing import WeightOwner, open_weights

FACTS = {"model": "a test's"}

def say(*values):
    print(*values, flush=True)

def cached():
    held = Cache(Path(sys.argv[1]), 1 << 20).open(entry_key(FACTS))
    assert held is not None
    return held

def try_to_open(handle, timeout=10.0):
    try:
        with open_weights(int(handle), timeout) as shared:
            say("opened", Path(shared.model).read_text())
    except WeightAccessError as exc:
        say("refused", exc)
"""

CLIENT = """
say("ready")
for line in sys.stdin:
    try_to_open(line)
"""

OWNER = """
owner = WeightOwner(cached(), map(int, sys.argv[2:]))
say(owner.handle)
for line in sys.stdin:
    owner.close()
    say("closed")
"""

NAMESPACE = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
"""Runs a program as pid 1 of a pid namespace of its own, as the root of a user namespace."""


def script(text: str, *arguments: object, within: Sequence[str] = ()) -> Program:
    """A program that answers lines with lines."""
    command = (*within, sys.executable)
    return Program(PREAMBLE + dedent(text), *arguments, command=command, talks=True)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """A cache with one entry, as small as one can be, that nobody holds."""

    def fill(folder: Path, _: int) -> None:
        (folder / "model.onnx").write_text(CONTENT)

    cache = Cache(tmp_path / "cache", 1 << 20)
    cache.make(FACTS, fill, wait=10).close()
    return cache


@pytest.fixture
def held(cache: Cache) -> Iterator[Held]:
    held = cache.open(entry_key(FACTS))
    assert held is not None
    yield held
    held.close()


@pytest.fixture(scope="module")
def client() -> Iterator[Program]:
    """A process that tries to open each handle that it is asked for."""
    with script(CLIENT) as program:
        assert program.line() == "ready"
        yield program


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """What runs a program in a pid namespace of its own, where that is permitted."""
    try:
        subprocess.run([*NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no pid namespace can be made: {exc}")
    return NAMESPACE


def kill(owner: Program) -> None:
    """Kill it, and wait until it is a zombie."""
    owner.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)


def refusal(owner: WeightOwner, pid: int) -> str:
    return (
        f"refused the owner of weights {owner.handle} refused process {pid}: "
        f"allow it there with WeightOwner.allow({pid})"
    )


def unanswered(handle: int) -> str:
    return (
        f"refused weights {handle}: no process shares any by this number: it is wrong, or its owner has "
        "ended or closed them, or lives in another network namespace"
    )


# Who gets them.


def test_process_is_allowed_and_revoked_while_the_owner_serves(held: Held, client: Program) -> None:
    with WeightOwner(held) as owner:
        unlisted = client.ask(owner.handle)
        owner.allow(client.pid)
        assert client.ask(owner.handle) == OPENED
        owner.revoke(client.pid)
        assert client.ask(owner.handle) == unlisted == refusal(owner, client.pid)


def test_another_users_process_gets_nothing_though_it_is_listed(held: Held) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    text = """
    handle = int(sys.stdin.readline())
    os.setuid(int(sys.argv[1]))
    try_to_open(handle)
    sys.stdin.readline()
    # What the owner sends to one who does not ask whose it is.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address(handle))
        data, rights, _, _ = connection.recvmsg(1000, 1000)
        say(data.decode(), rights)
    """
    with (
        script(text, OTHER_USER) as other,
        WeightOwner(held, [other.pid]) as owner,
    ):
        assert other.ask(owner.handle) == (
            f"refused weights {owner.handle} are shared by a process of user 0, and this one is "
            f"of user {OTHER_USER}"
        )
        assert other.ask("go on") == (f"refused process {other.pid}: it belongs to another user []")


def test_later_process_of_a_listed_pid_is_refused(cache: Cache, namespace: Sequence[str]) -> None:
    text = """
    owner = WeightOwner(cached())

    def child():
        pid = os.fork()
        if not pid:
            sys.stdin.readline()
            try_to_open(owner.handle)
            os._exit(0)
        return pid

    listed = child()
    owner.allow(listed)
    first = start_time(listed)
    os.kill(listed, signal.SIGKILL)
    os.waitpid(listed, 0)
    # Start times are in ticks: no two processes of one pid have the same in real life.
    while time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") < first + 2:
        time.sleep(0.001)
    for allowed_again in (False, True):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(listed - 1))
        later = child()
        if allowed_again:
            owner.allow(later)
        say("pids", listed, later)
        os.waitpid(later, 0)
    """
    with script(text, cache.folder, within=namespace) as program:
        _, listed, later = program.line().split()
        assert listed == later
        assert f"refused process {later}: allow it" in program.ask("go on")
        assert program.line() == f"pids {listed} {later}"
        assert program.ask("go on") == OPENED


def test_process_in_another_pid_namespace_is_listed_by_its_pid_outside(
    held: Held, namespace: Sequence[str]
) -> None:
    with script(CLIENT, within=namespace) as inner, WeightOwner(held) as owner:
        assert inner.line() == "ready"
        (process,) = psutil.Process(inner.pid).children()
        assert inner.ask(owner.handle) == refusal(owner, process.pid)
        owner.allow(process.pid)
        assert inner.ask(owner.handle) == OPENED
        owner.close()
        assert inner.ask(owner.handle) == unanswered(owner.handle)


# Owners that do not answer.


def test_weights_of_a_killed_owner_are_not_given_out_and_those_given_stay_usable(
    cache: Cache, client: Program
) -> None:
    with script(OWNER, cache.folder, client.pid, os.getpid()) as owner:
        handle = int(owner.line())
        assert client.ask(handle) == OPENED
        shared = open_weights(handle)
        kill(owner)
        assert client.ask(handle) == unanswered(handle)  # though its parent has not waited for it
    assert cache.clear() == (0, 1)
    assert Path(shared.model).read_text() == CONTENT
    shared.close()
    assert cache.clear()[1] == 0
    assert not shared.folder.exists()


def test_owner_that_is_garbage_is_closed(held: Held, client: Program) -> None:
    owner = WeightOwner(held, [client.pid])
    handle = owner.handle
    assert client.ask(handle) == OPENED
    del owner
    # Its thread has yet to notice: until then it may answer, or hang up.
    deadline = time.monotonic() + 5.0
    while (answer := client.ask(handle)) != unanswered(handle):
        assert answer == OPENED or "hung up" in answer
        assert time.monotonic() < deadline


def test_another_users_process_with_a_dead_owners_name_is_not_believed() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    text = """
    os.setuid(int(sys.argv[1]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address(int(sys.argv[2])))
        listening.listen()
        say("taken")
        connection, _ = listening.accept()
        connection.recv(1)
    """
    handle = 1 << 61 | os.getpid()
    with script(text, OTHER_USER, handle) as other:
        assert other.line() == "taken"
        with pytest.raises(WeightAccessError, match=f"a process of user {OTHER_USER}"):
            open_weights(handle)


# What outlives the owner.


def test_interpreter_ends_without_a_word_though_owners_are_open(cache: Cache) -> None:
    text = """
    owners = [WeightOwner(cached(), [os.getpid()]) for _ in range(3)]
    shared = open_weights(owners[0].handle)
    """
    with script(text, cache.folder) as program:
        ended = program.wait()
    assert (ended.status, ended.out, ended.err) == (0, "", "")


# Children that the owner's process forks.

FORKING = """
    owner = WeightOwner(cached(), map(int, sys.argv[2:]))
    said, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        owner.close()
        try:
            owner.allow(os.getpid())
        except ClosedError as exc:
            assert "forked" in str(exc)
            os.write(said[1], b"x")
        with WeightOwner(cached(), [os.getpid()]) as own:
            open_weights(own.handle).close()
        del owner
        os.write(said[1], b"x")
        os.read(told[0], 1)
        os._exit(0)
    assert os.read(said[0], 1) + os.read(said[0], 1) == b"xx"
    say(owner.handle, child)
"""


def test_forked_child_neither_ends_the_owner_nor_keeps_its_name(
    cache: Cache, client: Program
) -> None:
    text = """
    sys.stdin.readline()
    owner.close()
    say("closed")
    sys.stdin.readline()
    os.write(told[1], b"x")
    say(os.waitpid(child, 0)[1])
    """
    with script(FORKING + text, cache.folder, client.pid) as owner:
        handle, child = map(int, owner.line().split())
        assert client.ask(handle) == OPENED
        assert owner.ask("close") == "closed"
        assert is_alive(child)
        assert client.ask(handle) == unanswered(handle)
        assert owner.ask("end") == "0"


def test_forked_child_does_not_hide_that_the_owner_was_killed(
    cache: Cache, client: Program
) -> None:
    with script(FORKING + "    sys.stdin.readline()", cache.folder, client.pid) as owner:
        handle, child = map(int, owner.line().split())
        kill(owner)
        assert is_alive(child)
        assert client.ask(handle) == unanswered(handle)
        os.kill(child, signal.SIGKILL)


# Many at once, and those that behave badly.


def test_client_that_does_not_read_holds_nobody_up(held: Held, client: Program) -> None:
    mute = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(50)]
    with WeightOwner(held, [client.pid, os.getpid()]) as owner:
        for connection in mute:
            connection.connect(address(owner.handle))
            with suppress(BrokenPipeError):  # it was answered, and hung up on, before
                connection.send(bytes(1000))
        assert client.ask(owner.handle) == OPENED
    for connection in mute:
        connection.close()


def test_owner_without_a_free_descriptor_answers_once_it_has_one(cache: Cache) -> None:
    text = """
    owner = WeightOwner(cached(), map(int, sys.argv[2:]))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    files = []
    try:
        while True:
            files.append(open(os.devnull))
    except OSError:
        say(owner.handle)
    sys.stdin.readline()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    say(time.process_time())
    sys.stdin.readline()
    """
    with script(text, cache.folder, os.getpid()) as owner:
        handle = int(owner.line())
        with pytest.raises(WeightAccessError, match="did not answer within"):
            open_weights(handle, 0.5)
        assert float(owner.ask("go on")) < 0.4  # it did not try without a pause
        open_weights(handle).close()
