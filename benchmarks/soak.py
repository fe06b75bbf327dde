"""Mixed traffic against a pool whose workers are killed all the time: nothing lost, wrong or left.

    python benchmarks/soak.py [--seconds N] [--engine fake|onnxruntime] [--seed N] [--kills]
    python benchmarks/soak.py --parallel tensor=2,pipeline=2 --max-batch-size 64

Threads and asyncio tasks send requests of 0 rows to 64 MiB (traffic.py), others kill, stop and restart
workers, replace weights and ask for the figures (disturbances.py), and all of it is written down and
compared (books.py). What the pool has after a first warm-up, it may have at the end. The exit status is 1
where anything was not as promised. With ``--kills``, a pool with default options is under kills alone, and
no request may fail. With ``--parallel``, a model that passes its input on is cut over groups of ranks:
requests have 1 to 64 rows, and a kill, which costs a whole group, comes every few seconds.
"""

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import numpy as np
import psutil
from books import COLUMNS, MAX_ROWS, ROW_BYTES, SLACK, Books, Harm, Request, Sample
from disturbances import kill_at_random, restart_workers, update_weights, watch
from measuring import machine_text, table
from traffic import PATIENCE, Scene, clients, daemons, write_cut_model, write_model

from mcinfer import (
    EngineOptions,
    Limits,
    Master,
    McinferError,
    Parallel,
    RestartPolicy,
    Statistics,
    Timeouts,
)
from mcinfer.bench.figures import seconds_text
from mcinfer.requests.tensors import Arrays

THREADS = 12
TASKS = 8
WORKERS = 3
QUEUE = 48
"""Requests in flight: fewer than the clients would have, so that some are refused."""

MEMORY = 256 << 20
"""Bytes of shared memory: not enough for two of the largest requests and anything else."""

GROUP_ROWS = 64
GROUP_KILL_PERIOD = 4.0
KILL_PERIOD = 0.2

LIMIT = 100
"""Seconds beside the traffic, after which something hangs."""

KILLED_WORKERS = 2
KILLED_CLIENTS = 24
KILL_PAUSE = (0.3, 0.9)
"""Seconds between two kills."""

_SETTLING = 30.0
_LINE_PERIOD = 10.0
_OWN_BAND = 16 << 20
"""Bytes that the master's own memory may have grown by: what its allocator keeps of heaps that are in use."""

_MIB = 1 << 20

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Of mallopt(3)."""


def _say(text: str) -> None:
    print(text, flush=True)


class _LastRecords(logging.Handler):
    """The pool's log: how much of which level, and the last of it, for where a check fails."""

    def __init__(self) -> None:
        super().__init__()
        self.levels: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=40)

    def emit(self, record: logging.LogRecord) -> None:
        self.levels[record.levelname] += 1
        first, *more = record.getMessage().splitlines() or [""]
        self.last.append(f"{record.levelname} {first[:200]}{' …' if more else ''}")


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = monotonic() + seconds
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(0.02)
    return True


# What the process has.


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What the master's process has.

    Attributes:
        own_bytes: Resident memory that it shares with no file and no other process.
        reserved_bytes: Shared memory that is reserved for them.
        descriptors: Without those of the shared memory, which grows and shrinks by blocks.
        threads: Of all kinds.
        processes: Its children.
    """

    own_bytes: int
    reserved_bytes: int
    descriptors: int
    threads: int
    processes: int


def holdings(statistics: Statistics | None) -> Holdings:
    """What this process has now, with a pool of those figures or none."""
    process = psutil.Process()
    memory = process.memory_info()
    return Holdings(
        own_bytes=memory.rss - memory.shared,
        reserved_bytes=0 if statistics is None else statistics.memory_bytes,
        descriptors=_descriptors(),
        threads=len(os.listdir("/proc/self/task")),
        processes=len(process.children(recursive=True)),
    )


def _descriptors() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}") != "/memfd:mcinfer (deleted)"
        except OSError:
            continue  # that of the listing itself
    return count


def keep_no_freed_memory() -> None:
    """Have large arrays mapped one by one, and one heap for all threads, which can be trimmed.

    glibc would raise its threshold with the arrays that are freed, and keep as much in a heap per thread.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_ARENA_MAX, 1)
    libc.mallopt(_M_MMAP_THRESHOLD, _MIB)


def tidy() -> None:
    """Let go of garbage, and give the pages of freed memory back, so that what is left is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# The run.


def _traffic(scene: Scene, seconds: float) -> None:
    """All clients and all that disturbs them, for so long; a line every ten seconds."""
    master, books = scene.master, scene.books
    works = [kill_at_random, restart_workers, watch]
    if master.weights:
        works.append(update_weights)
    disturbers = [(work.__name__, lambda work=work: work(scene)) for work in works]
    threads = [*clients(scene, THREADS, TASKS), *daemons(books, disturbers)]
    began = monotonic()
    for thread in threads:
        thread.start()
    while (left := began + seconds - monotonic()) > 0:
        sleep(min(_LINE_PERIOD, left))
        _say(_line(monotonic() - began, books, master.statistics()))
    scene.stop.set()
    deadline = monotonic() + PATIENCE + SLACK + _SETTLING
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        books.find(f"did not end within {deadline - began - seconds:.0f} s of the traffic: {stuck}")
        faulthandler.dump_traceback(all_threads=True)


def _settle(master: Master, books: Books) -> Holdings:
    """Wait until nothing is in flight and all workers serve; what the process has then."""

    def quiet() -> bool:
        now = master.statistics()
        if any(
            worker.state != "ready" for worker in now.workers
        ):  # one may hang, and be killed yet
            return False
        return not (now.in_flight or now.queued_shards or now.in_flight_bytes)

    if not _wait_until(quiet, _SETTLING):
        books.find(f"not quiet within {_SETTLING:g} s of the traffic: {master.statistics()}")
    master.wait_ready(_SETTLING)
    weights = ROW_BYTES * bool(books.updated)

    def freed() -> bool:
        gc.collect()
        return master.statistics().memory_used_bytes == weights

    if not _wait_until(freed, SLACK):
        used = master.statistics().memory_used_bytes
        books.find(f"{used} bytes of shared memory are in use, expected {weights}")
    tidy()

    def rested() -> bool:
        return not any(thread.name.startswith("mcinfer-wait") for thread in threading.enumerate())

    if not _wait_until(rested, SLACK):
        books.find(f"threads wait for nobody {SLACK:g} s after the traffic")
    return holdings(master.statistics())


def _ask(master: Master, books: Books, sample: Sample, rows: int) -> tuple[Request, Arrays]:
    """One request of so many rows, amid no others, and its answer."""
    request = Request(client="the program", harm="none", rows=rows, first=0, timeout=PATIENCE)
    books.begin(request)
    outputs = master.predict([sample.rows(0, rows)], timeout=PATIENCE)
    books.end(request, None)
    books.judge(request, outputs)
    return request, outputs


def _check_growth(books: Books, start: Holdings, end: Holdings) -> None:
    """What the process has after the traffic is what it had before."""
    if end.own_bytes > start.own_bytes + _OWN_BAND:
        books.find(f"own memory grew from {start.own_bytes} to {end.own_bytes} bytes")
    if end.reserved_bytes > MEMORY:
        books.find(f"{end.reserved_bytes} bytes are reserved for tensors, the limit is {MEMORY}")
    for name in ("descriptors", "threads", "processes"):
        if getattr(start, name) != getattr(end, name):
            books.find(
                f"{name}: {getattr(start, name)} before the traffic, {getattr(end, name)} after"
            )


def _check_counts(books: Books, statistics: Statistics) -> None:
    """The pool's own count, what it told of each, and what the clients saw are one.

    Pieces that failed may have been tried once more as a whole, which counts and is not told of.
    """
    books.balance()
    again = books.told["failed"]
    for name, most in (("succeeded", 0), ("failed", again), ("cancelled", again)):
        if not 0 <= getattr(statistics, name) - books.told[name] <= most:
            books.find(
                f"statistics: {getattr(statistics, name)} {name}, but {books.told[name]} were told of"
            )
    if not 0 <= statistics.accepted - books.told.total() <= again:
        books.find(f"{statistics.accepted} accepted, {books.told.total()} told of")


def _check_end(books: Books, before: Holdings, runtime: Path) -> None:
    """Nothing is left of a pool that was closed."""

    def left() -> list[str]:
        gc.collect()
        now = holdings(None)
        names = ("descriptors", "threads", "processes")
        pairs = [(name, getattr(before, name), getattr(now, name)) for name in names]
        texts = [f"{name}: {old} before, {new} after" for name, old, new in pairs if old != new]
        return [*texts, *(str(path) for path in runtime.glob("mcinfer-*"))]

    if not _wait_until(lambda: not left(), SLACK):
        books.find(f"left behind: {left()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What was seen of a pool, before and after its traffic; the warm-up is left out but for findings."""

    outcomes: Counter[tuple[Harm, str]]
    events: Counter[str]
    start: Holdings
    end: Holdings
    first: Statistics
    last: Statistics


def _soak(options: argparse.Namespace, model: Path, books: Books, sample: Sample) -> _Seen:
    """The whole life of a pool."""
    groups = options.parallel
    settings: dict[str, Any] = {
        "acts": options.engine == "fake" and groups is None,
        "most_rows": GROUP_ROWS if groups else MAX_ROWS,
        "kill_period": GROUP_KILL_PERIOD if groups else KILL_PERIOD,
        # One that is stopped while it starts keeps its whole group from starting.
        "continue_share": 1.0 if groups else 0.5,
    }
    weights = [] if groups else ["w"]
    master = Master(
        model,
        [f"cpu:{i}" for i in range(groups.devices if groups else WORKERS)],
        parallel=groups,
        engine="onnxruntime" if groups else options.engine,
        options=EngineOptions(
            threads=1, variable_weights=weights, concurrent_runs=options.concurrent_runs
        ),
        timeouts=Timeouts(start=60.0, predict=PATIENCE, cancel_grace=0.3),
        restart=RestartPolicy(budget=1_000_000, backoff=0.01, backoff_limit=0.05),
        limits=Limits(queue=QUEUE, memory_bytes=MEMORY),
        max_batch_size=options.max_batch_size,
        trace=books.hear,
        verify="never",  # the runs of a check would count as requests that no caller made
    )
    with master:
        _say(f"warming up for {options.warm_up:g} s")
        _ask(
            master, books, sample, settings["most_rows"]
        )  # threads and memory for it are there then
        scenes = [
            Scene(master=master, books=books, sample=sample, seed=seed, **settings)
            for seed in (options.seed + 1, options.seed)
        ]
        _traffic(scenes[0], options.warm_up)
        start, first = _settle(master, books), master.statistics()
        _say(f"{options.seconds:g} s of traffic, seed {options.seed}")
        outcomes, events = books.outcomes.copy(), books.events.copy()
        _traffic(scenes[1], options.seconds)
        end, last = _settle(master, books), master.statistics()
        _check_growth(books, start, end)
        kept, outputs = _ask(master, books, sample, 3)
    books.judge(kept, outputs)  # answers outlive their pool
    _check_counts(books, master.statistics())
    return _Seen(
        outcomes=books.outcomes - outcomes,
        events=books.events - events,
        start=start,
        end=end,
        first=first,
        last=last,
    )


# Kills alone, of a pool as it comes.


def _under_kills(options: argparse.Namespace, model: Path, books: Books) -> None:
    """Clients of a pool with default options while a random worker is killed again and again."""
    stop, lock = threading.Event(), threading.Lock()
    ends, texts = Counter[str](), dict[str, str]()

    def ask(number: int) -> None:
        chance = Random(f"{options.seed}/{number}")  # noqa: S311 no secret
        while not stop.is_set():
            x = np.full((chance.randint(1, 4), COLUMNS), chance.randint(0, 99), np.float32)
            try:
                y = master.predict([x])["y"]
                end = "right" if np.array_equal(y, 2 * x) else "wrong"
            except McinferError as exc:
                end = type(exc).__name__
                texts[end] = str(exc)
                stop.wait(0.001)  # a pool that refuses all is not to be flooded
            with lock:
                ends[end] += 1

    def kill() -> None:
        chance = Random(f"{options.seed}/killer")  # noqa: S311 no secret
        while not stop.wait(chance.uniform(*KILL_PAUSE)):
            pids = [worker.pid for worker in master.statistics().workers if worker.pid]
            if pids:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    books.count("kills")

    given = EngineOptions(concurrent_runs=options.concurrent_runs)
    with Master(model, KILLED_WORKERS, engine=options.engine, options=given) as master:
        clients = [threading.Thread(target=ask, args=(n,)) for n in range(KILLED_CLIENTS)]
        for thread in (*clients, killer := threading.Thread(target=kill)):
            thread.start()
        sleep(options.seconds)
        stop.set()
        for thread in (*clients, killer):
            thread.join()
        restarts = sum(worker.restarts for worker in master.statistics().workers)
    kills = books.events["kills"]
    counts = {"kills": kills, "restarts": restarts, **dict(ends.most_common())}
    _say(table(("", ""), [[name, str(n)] for name, n in counts.items()]))
    for end in {*ends} - {"right"}:
        books.find(f"{ends[end]} answers were {end}: {texts.get(end, '')[:300]}")


# What is printed.


def _line(seconds: float, books: Books, now: Statistics) -> str:
    outcomes = ", ".join(f"{name} {number}" for name, number in books.by_outcome.most_common())
    restarts = sum(worker.restarts for worker in now.workers)
    return (
        f"{seconds:5.0f} s: {outcomes}; {restarts} restarts; tensors {now.memory_used_bytes / _MIB:.0f} "
        f"of {now.memory_bytes / _MIB:.0f} MiB; {now.health.state}, {now.in_flight} in flight"
    )


def _report(books: Books, seen: _Seen, seconds: float) -> None:
    """Print the tables."""
    outcomes, first, last = seen.outcomes, seen.first, seen.last
    kinds = sorted({harm for harm, _ in outcomes})
    columns = sorted({outcome for _, outcome in outcomes}, key=lambda name: (name != "ok", name))
    rows = [[kind, *(str(outcomes[kind, column] or "") for column in columns)] for kind in kinds]
    totals = [str(sum(outcomes[kind, column] for kind in kinds)) for column in columns]
    _say(f"\n{table(('done to it', *columns), [*rows, ['all', *totals]])}")
    restarts = sum(w.restarts for w in last.workers) - sum(w.restarts for w in first.workers)
    figures = {
        **{name: f"{number}" for name, number in sorted(seen.events.items())},
        "requests a second": f"{outcomes.total() / seconds:.0f}",
        "restarts of workers": f"{restarts}",
        "updates of weights": f"{last.weights_version - first.weights_version}",
        "latest after its time-out": seconds_text(books.latest),
    }
    _say(f"\n{table(('beside them', ''), [*figures.items()])}")
    before, after = asdict(seen.start), asdict(seen.end)
    rows = [[name, _amount(name, before[name]), _amount(name, after[name])] for name in before]
    _say(f"\n{table(('the process', 'start', 'end'), rows)}")


def _report_findings(findings: Sequence[str], log: _LastRecords) -> None:
    _say("log: " + ", ".join(f"{number} {level}" for level, number in sorted(log.levels.items())))
    if not findings:
        _say("all as promised")
        return
    _say("the last of it:")
    for text in log.last:
        _say(f"  {text}")
    _say(f"\nNOT AS PROMISED: {len(findings)}")
    for text in findings:
        _say(f"- {text}")


def _amount(name: str, value: int) -> str:
    return f"{value / _MIB:.1f} MiB" if name.endswith("_bytes") else str(value)


def _parallel(text: str) -> Parallel:
    parts = dict(part.split("=") for part in text.split(","))
    return Parallel(**{name: int(number) for name, number in parts.items()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(description="Mixed traffic against a pool that is disturbed.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of traffic (default: 600)")
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds of it before (default: 5)"
    )
    parser.add_argument("--engine", choices=("fake", "onnxruntime"), default="fake")
    parser.add_argument(
        "--parallel", type=_parallel, metavar="tensor=2,pipeline=2", help="a model cut over ranks"
    )
    parser.add_argument("--max-batch-size", type=int, default=1, help="rows of a joined run")
    parser.add_argument("--concurrent-runs", type=int, default=1, help="of a worker, at once")
    parser.add_argument(
        "--kills",
        action="store_true",
        help=f"instead: {KILLED_CLIENTS} clients of a pool of {KILLED_WORKERS} workers with default options; "
        "every %g to %g s one of the workers is killed, and no request may fail" % KILL_PAUSE,
    )
    parser.add_argument("--seed", type=int, default=0, help="of what the clients choose")
    options = parser.parse_args(arguments)
    # Whatever hangs: all threads' stacks are printed, and the process ends.
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    signal.alarm(int(options.seconds) + LIMIT)
    log = _LastRecords()
    logging.getLogger("mcinfer").addHandler(log)
    logging.getLogger("mcinfer").propagate = False
    keep_no_freed_memory()
    _say(machine_text())
    sample = Sample()
    books = Books(sample)
    folder = Path(tempfile.mkdtemp(prefix="mcs-", dir="/tmp"))  # a socket's path is short
    try:
        os.environ["XDG_RUNTIME_DIR"] = str(folder)
        os.environ["MCINFER_CACHE"] = str(folder / "cache")  # not the user's
        before = holdings(None)
        cut = options.parallel is not None
        model = write_cut_model(folder) if cut else write_model(folder, options.engine)
        if options.kills:
            _under_kills(options, model, books)
            _check_end(books, before, folder)
        else:
            seen = _soak(options, model, books, sample)
            _check_end(books, before, folder)
            _report(books, seen, options.seconds)
    except McinferError as exc:
        books.find(f"the soak ended early: {exc!r}")
    finally:
        shutil.rmtree(folder)
    signal.alarm(0)
    _say("")
    _report_findings(books.findings, log)
    return 1 if books.findings else 0


if __name__ == "__main__":
    sys.exit(main())
