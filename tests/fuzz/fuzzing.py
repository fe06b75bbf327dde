"""The loop of the fuzzer: make an input, give it to a target, count what came of it."""

import gc
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.fuzz.master_target import MasterTarget
from tests.fuzz.mutating import corpus, mutate
from tests.fuzz.target import Violation
from tests.fuzz.worker_target import WorkerTarget

Target = MasterTarget | WorkerTarget
TARGETS: dict[str, Callable[[Path], Target]] = {
    "master": lambda _: MasterTarget(),
    "worker": WorkerTarget,
}
"""A target takes messages. Any error but those that handling may raise is a finding."""

_MAX_DESCRIPTORS_MORE = 4


def fuzz(
    name: str, numbers: Iterable[int], seed: int, *, time_limit: float | None = None
) -> Counter[str]:
    """Give a target inputs, each of which the seed and its number alone decide; how often what came of them.

    Args:
        name: One of `TARGETS`.
        numbers: Of the inputs.
        seed: Of all of them.
        time_limit: Seconds for each; None leaves the process's timer alone.

    Raises:
        Violation: A promise was broken; the cause is how.
    """
    originals, outcomes = corpus(), Counter[str]()
    with opened(name) as target:
        descriptors = _descriptors()
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")  # noqa: S311 no secret
            live = target.prepare(rng)
            pool = live if live and rng.random() < 0.8 else originals
            data = rng.choice(pool)
            if pool is originals or rng.random() < 0.5:
                data = mutate(rng, data, originals)
            try:
                with _limited(time_limit):
                    outcomes[target.take(data)] += 1
            except Exception as exc:
                again = f"python -m tests.fuzz --target {name} --seed {seed} --only {number}"
                raise Violation(f"{exc!r} for {data!r}; again: {again}") from exc
        gc.collect()
        if (left := _descriptors() - descriptors) > _MAX_DESCRIPTORS_MORE:
            raise Violation(f"{name}: {left} descriptors were left open")
    return outcomes


@contextmanager
def opened(name: str) -> Iterator[Target]:
    # Not pytest's folder: the path of a socket may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mcf-") as folder:
        target = TARGETS[name](Path(folder))
        try:
            yield target
        finally:
            target.close()


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return

    def stop(_: int, __: FrameType | None) -> None:
        raise Violation(f"not done within {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
