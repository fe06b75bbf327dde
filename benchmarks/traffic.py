"""Clients of all kinds for one pool: threads and asyncio tasks that ask, cancel, run out of time and err.

Each has a generator of its own, seeded by its name, so that a run's choices can be had again; what the
machine makes of them cannot. Answers are kept for a while and looked at again, since they may not change.
"""

import asyncio
import json
import threading
import traceback
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import onnx
from books import COLUMNS, MAX_ROWS, SLACK, Books, Harm, Request, Sample
from onnx import TensorProto, helper, numpy_helper

from mcinfer import Master, PredictTimeoutError, QueueFullError
from mcinfer.requests.tensors import Arrays, Inputs

PATIENCE = 20.0
"""Seconds that a request has to which nothing is done."""

ACTS = {"-1": "fail", "-2": "segfault", "-3": "abort", "-4": "exit", "-5": "hang:3600"}
"""What the fake engine does in a run with a row that begins with such a number."""

_NUMBERS: dict[Harm, tuple[float, ...]] = {
    "fail": (-1.0,),
    "crash": (-2.0, -3.0, -4.0),
    "hang": (-5.0,),
}
_HANG_TIMEOUT = 0.3
_CRASH_PERIOD = 3.0
_HANG_PERIOD = 3.0
"""Seconds between two of a kind, all clients together: each costs the pool a worker or two."""

_MAX_HARMED_ROWS = 64
_MAX_TASK_ROWS = 4096
"""A task's inputs are copied in the event loop's thread, which others wait for."""

_STEEPNESS = 6.0
"""Of the sizes: the median request has one row, one in thirteen a megabyte and more, the mean is 1 MB."""

_FEW_ROWS = 64
"""Up to so many, all sizes come alike often."""

_MAX_BURST = 8
_MAX_KEPT = 6
_MODEST_ROWS = 1024
"""Of answers that are kept, and of inputs that are given in another layout."""


class Ration:
    """Something that may be had once in so many seconds."""

    def __init__(self, seconds: float) -> None:
        """The first may be had at once."""
        self._lock = threading.Lock()
        self._seconds = seconds
        self._next = monotonic()

    def take(self) -> bool:
        """Whether it may be had now; if so it was."""
        with self._lock:
            if monotonic() < self._next:
                return False
            self._next = monotonic() + self._seconds
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What all clients share.

    Attributes:
        master: Whom they ask.
        books: Where they write it down.
        sample: What their inputs are cut from.
        acts: Whether the model's runs can be asked to fail, to crash and to hang (`ACTS`).
        seed: Of all generators.
        most_rows: Of a request.
        kill_period: Seconds between two acts against a worker.
        continue_share: Of the workers that are stopped; others stay so until they are killed, or the end.
        crashes: When another run may end its worker.
        hangs: When another run may go on for ever.
        stop: Set when they are to finish what they have and ask no more.
    """

    master: Master
    books: Books
    sample: Sample
    acts: bool
    seed: int
    most_rows: int
    kill_period: float
    continue_share: float
    crashes: Ration = field(default_factory=lambda: Ration(_CRASH_PERIOD))
    hangs: Ration = field(default_factory=lambda: Ration(_HANG_PERIOD))
    stop: threading.Event = field(default_factory=threading.Event)


def write_model(folder: Path, engine: str) -> Path:
    """Write a model of that engine: y = 2x + w, where w can be replaced."""
    if engine == "fake":
        path = folder / "model.json"
        rule = {"from": "x", "scale": 2, "add": "w"}
        content = {
            "inputs": [["x", "float32", ["batch", COLUMNS]]],
            "outputs": [["y", "float32", ["batch", COLUMNS], rule]],
            "weights": [["w", "float32", [COLUMNS], 0.0]],
            "when": ACTS,
        }
        path.write_text(json.dumps(content), encoding="utf-8")
        return path
    path = folder / "model.onnx"
    shape: list[str | int | None] = ["batch", COLUMNS]
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "two"], ["doubled"]),
            helper.make_node("Add", ["doubled", "w"], ["y"]),
        ],
        "affine",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [
            numpy_helper.from_array(np.array(2, np.float32), "two"),
            numpy_helper.from_array(np.zeros(COLUMNS, np.float32), "w"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, path)
    return path


def write_cut_model(folder: Path) -> Path:
    """Write a model to be cut over ranks: y = 2x, in products of whole numbers, and x itself."""
    shape: list[str | int | None] = ["batch", COLUMNS]
    factors = (2, 1, 1, 1)
    nodes = []
    for layer in range(len(factors)):
        product, made = f"product{layer}", "y" if layer == len(factors) - 1 else f"h{layer + 1}"
        given = f"h{layer}" if layer else "x"
        nodes.append(helper.make_node("MatMul", [given, f"w{layer}"], [product]))
        nodes.append(helper.make_node("Abs", [product], [made]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    weights = [
        numpy_helper.from_array(np.eye(COLUMNS, dtype=np.float32) * factor, f"w{layer}")
        for layer, factor in enumerate(factors)
    ]
    graph = helper.make_graph(nodes, "chain", [x], [y, x], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    path = folder / "cut.onnx"
    onnx.save(model, path)
    return path


class _Client:
    """Chooses requests, and looks at answers, at once and again later."""

    def __init__(self, scene: Scene, name: str, most_rows: int) -> None:
        self._scene = scene
        self._name = name
        self._master = scene.master
        self._books = scene.books
        self._most_rows = most_rows
        self._chance = Random(f"{scene.seed}/{name}")  # noqa: S311 no secret
        self._kept: list[tuple[Request, Arrays]] = []

    def _choose(self, *, cancellable: bool) -> Request:
        """The next request."""
        harm = self._choose_harm(cancellable)
        rows = 0 if self._chance.random() < 0.02 else self._choose_rows()
        timeout = PATIENCE
        if harm in _NUMBERS:
            rows = 1 + rows % _MAX_HARMED_ROWS
        if harm == "time-out":
            rows, timeout = max(1, rows), 10.0 ** self._chance.uniform(-4.0, -1.7)
        if harm == "hang":
            timeout = _HANG_TIMEOUT
        first = self._chance.randrange(4096)
        return Request(client=self._name, harm=harm, rows=rows, first=first, timeout=timeout)

    def _choose_harm(self, cancellable: bool) -> Harm:
        kinds: list[Harm] = ["none", "cancel", "time-out", "bad", "fail", "crash", "hang"]
        [harm] = self._chance.choices(kinds, [80, 6, 6, 4, 4, 2, 2])
        possible = {
            "cancel": cancellable,
            "fail": self._scene.acts,
            "crash": self._scene.acts and harm == "crash" and self._scene.crashes.take(),
            "hang": self._scene.acts and harm == "hang" and self._scene.hangs.take(),
        }
        return harm if possible.get(harm, True) else "none"

    def _choose_rows(self) -> int:
        if self._most_rows <= _FEW_ROWS:
            return self._chance.randint(1, self._most_rows)
        share: float = self._chance.random() ** _STEEPNESS
        return min(self._most_rows, int((MAX_ROWS + 1) ** share))

    def _inputs(self, request: Request) -> Inputs:
        """Its inputs, in one of the forms that there are."""
        x: Any = self._scene.sample.rows(request.first, request.rows)
        if request.harm == "bad":
            misfits: list[Inputs] = [{"x": x[:, 1:]}, {"z": x}, {"x": x[:, 0]}, [x, x], {}]
            return self._chance.choice(misfits)
        if request.harm in _NUMBERS:
            x = x.copy()
            x[self._chance.randrange(request.rows), 0] = self._chance.choice(_NUMBERS[request.harm])
            return {"x": x}
        form = self._chance.random()
        if form < 0.15:
            return self._allocated(request) or {"x": x}
        if form < 0.25 and request.rows <= _MODEST_ROWS:
            return {"x": x.astype(">f4")}
        if form < 0.35 and request.rows <= _MODEST_ROWS:
            return {"x": np.asfortranarray(x)}
        return [x] if form < 0.5 else {"x": x}

    def _allocated(self, request: Request) -> Arrays | None:
        """Inputs in shared memory, if there is any."""
        try:
            inputs = self._master.allocate({"x": (request.rows, COLUMNS)})
        except QueueFullError:
            self._books.count("allocations refused")
            return None
        self._books.count("allocations")
        inputs["x"][...] = self._scene.sample.rows(request.first, request.rows)
        return inputs

    def _priority(self) -> int:
        return self._chance.choice((0, 0, 0, -1, 1, 5))

    def _shards(self) -> int | None:
        return self._chance.choice((None, None, None, 1, 2, 7))

    def _receive(self, request: Request, inputs: Inputs, outputs: Arrays) -> None:
        """An answer: it is looked at, and perhaps kept."""
        if isinstance(inputs, dict) and inputs["x"].flags.writeable:
            inputs["x"][...] = 0  # it is the caller's again: the answer may not lie there
        self._books.judge(request, outputs)
        if self._chance.random() < 0.3 and request.rows <= _MODEST_ROWS:
            self._kept.append((request, outputs))
        if len(self._kept) > _MAX_KEPT or (self._kept and self._chance.random() < 0.2):
            self._books.judge(*self._kept.pop(self._chance.randrange(len(self._kept))))

    def _give_up_kept(self) -> None:
        while self._kept:
            self._books.judge(*self._kept.pop())


class ThreadClient(_Client):
    """A thread: `predict`, and `submit` one by one and in bursts."""

    def __init__(self, scene: Scene, index: int) -> None:
        """Of that number among its like."""
        super().__init__(scene, f"thread {index}", scene.most_rows)

    def run(self) -> None:
        """Ask until the scene ends."""
        while not self._scene.stop.is_set():
            if self._chance.random() < 0.6:
                room = self._predict()
            else:
                room = self._submit(self._chance.randint(1, _MAX_BURST))
            if not room:
                self._scene.stop.wait(self._chance.uniform(0.005, 0.05))
        self._give_up_kept()

    def _predict(self) -> bool:
        """One `predict`; whether there was room for it."""
        request = self._choose(cancellable=False)
        inputs, shards, priority = self._inputs(request), self._shards(), self._priority()
        self._books.begin(request)
        try:
            outputs = self._master.predict(
                inputs, timeout=request.timeout, shards=shards, priority=priority
            )
        except Exception as exc:
            self._books.end(request, exc)
            return not isinstance(exc, QueueFullError)
        self._books.end(request, None)
        self._receive(request, inputs, outputs)
        return True

    def _submit(self, number: int) -> bool:
        """So many at once, then in odd order the answers; whether there was room."""
        asked: list[tuple[Request, Inputs, Future[Arrays]]] = []
        room = True
        while room and len(asked) < number:
            request = self._choose(cancellable=True)
            inputs, priority = self._inputs(request), self._priority()
            self._books.begin(request)
            try:
                future = self._master.submit(inputs, timeout=request.timeout, priority=priority)
            except Exception as exc:
                self._books.end(request, exc)
                room = not isinstance(exc, QueueFullError)
                number -= 1
                continue
            future.add_done_callback(partial(self._books.settle, request))
            asked.append((request, inputs, future))
        self._chance.shuffle(asked)
        while asked:
            self._await(*asked.pop())
        return room

    def _await(self, request: Request, inputs: Inputs, future: "Future[Arrays]") -> None:
        if request.harm == "cancel":
            if self._chance.random() < 0.5:
                self._scene.stop.wait(self._chance.uniform(0.0, 0.02))
            future.cancel()
            if future.cancelled():
                return
        try:
            outputs = future.result(request.timeout + SLACK + 10.0)
        except TimeoutError as exc:
            if not isinstance(exc, PredictTimeoutError):
                self._books.find(f"{request} did not settle")
        except Exception:
            return  # it is in the books
        else:
            self._receive(request, inputs, outputs)


class TaskClient(_Client):
    """An asyncio task: `predict_async`, one by one and several at once."""

    def __init__(self, scene: Scene, index: int) -> None:
        """Of that number among its like."""
        super().__init__(scene, f"task {index}", min(scene.most_rows, _MAX_TASK_ROWS))

    async def run(self) -> None:
        """Ask until the scene ends."""
        while not self._scene.stop.is_set():
            number = 1 if self._chance.random() < 0.7 else self._chance.randint(2, _MAX_BURST)
            async with asyncio.TaskGroup() as group:
                for _ in range(number):
                    request = self._choose(cancellable=True)
                    task = group.create_task(self._ask(request))
                    if request.harm == "cancel":
                        group.create_task(self._cancel(task))
            await asyncio.sleep(self._chance.uniform(0.0, 0.005))
        self._give_up_kept()

    async def _cancel(self, task: "asyncio.Task[None]") -> None:
        await asyncio.sleep(self._chance.choice((0.0, self._chance.uniform(0.0, 0.02))))
        task.cancel()

    async def _ask(self, request: Request) -> None:
        inputs, shards, priority = self._inputs(request), self._shards(), self._priority()
        self._books.begin(request)
        try:
            outputs = await self._master.predict_async(
                inputs, timeout=request.timeout, shards=shards, priority=priority
            )
        except asyncio.CancelledError:
            self._books.end(request, None, cancelled=True)
            raise
        except Exception as exc:
            self._books.end(request, exc)
            return
        self._books.end(request, None)
        self._receive(request, inputs, outputs)


def clients(scene: Scene, threads: int, tasks: int) -> list[threading.Thread]:
    """Threads to be started: so many clients, and an event loop with so many more."""

    async def run_tasks() -> None:
        async with asyncio.TaskGroup() as group:
            for index in range(tasks):
                group.create_task(TaskClient(scene, index).run())

    callers = [ThreadClient(scene, index) for index in range(threads)]
    targets = [(f"client {i}", caller.run) for i, caller in enumerate(callers)]
    return daemons(scene.books, [*targets, ("event loop", lambda: asyncio.run(run_tasks()))])


def daemons(books: Books, targets: Iterable[tuple[str, Any]]) -> list[threading.Thread]:
    """Threads to be started, by name and what they do; what ends one early is a finding."""

    def run(name: str, target: Any) -> None:
        try:
            target()
        except BaseException:
            books.find(f"{name} ended early: {traceback.format_exc()}")

    return [
        threading.Thread(target=run, args=item, name=f"soak {item[0]}", daemon=True)
        for item in targets
    ]
