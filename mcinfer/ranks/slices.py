"""One rank of a model that is cut over several: its segments, one ONNX Runtime session each, and its group.

::

    all ranks call `execute` with the same inputs
      │
      ├─ earlier stages ──► values                         (pipeline)
      ├─ segment ─► exchange with the ranks of the stage ─► segment ─► … (tensor)
      ├─ values ──► later stages
      └─ outputs ◄─► all ranks, if each wants them

The first run with new input shapes leaves the memory of all values to the runtime and the group, and so finds
their shapes. From then on, all values of such runs lie in fixed memory: see `mcinfer.ranks.layouts`.
If shapes change though those of the inputs do not, runs with these inputs continue without fixed memory.

Failures: inputs that do not fit are refused in `bind`, in all ranks alike. In a master's group, a rank whose
segment fails stays in step with the others. In the first run with new shapes, the ranks agree before each
meeting that all are well. In later ones the rank still takes part in all that follows, with what an earlier
run left in the memory, and the master drops what the others make of it. After any other failure the rank
breaks off the group, so that no rank waits for it, and the engine is of no more use (`Engine.broken`).

Ownership: the engine owns its sessions, its arena, and the group that it was given.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mcinfer.engines import _onnxruntime
from mcinfer.engines.base import (
    BoundRun,
    Buffer,
    Engine,
    EngineRequest,
    Produced,
    Strings,
    array_over,
    delivered,
)
from mcinfer.engines.preparation import Preparation
from mcinfer.errors import (
    BuildError,
    ClosedError,
    CollectiveTimeoutError,
    InvalidInputError,
    PredictError,
    RankDiedError,
    shortened,
)
from mcinfer.locks import Turn
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.model_cache.cache import MODEL_FILE, Held
from mcinfer.model_cache.onnx_files import check_regular
from mcinfer.private import PrivateFolder
from mcinfer.ranks.collectives.base import Collective, Group, PeerFailedError
from mcinfer.ranks.layouts import (
    MAX_LAYOUTS,
    Layouts,
    PlanMemory,
    Uses,
    Values,
    check_inputs,
    owned,
    run_once,
    tensor_in,
)
from mcinfer.ranks.slicing.plans import Exchange, RankPlan, Segment
from mcinfer.ranks.stage_links import StageLinks
from mcinfer.specs import element_type_name

_SHARED_ARENA = "session.use_env_allocators"
"""The runtime's option for sessions that share one arena: segments run one after another."""


def prepare(request: EngineRequest, segments: Path, folder: Path) -> None:
    """Prepare a rank's segments in a folder for `RankEngine`.

    The folder then has the plan and all weights, as ONNX Runtime's kernels pack them on this CPU.

    Args:
        request: How to run them. The segments' external data lie in the folder of its model.
        segments: The folder with the rank's plan and segments.
        folder: Exists, and is empty.

    Raises:
        BuildError: The runtime cannot load a segment.
    """
    plan = RankPlan.read(segments)
    for step in plan.steps:
        if isinstance(step, Segment):
            target = _prepared_form(folder, step).parent
            os.mkdir(target)
            _onnxruntime.prepare(_segment_request(request, segments, step), str(target))
    plan.write(folder)


def _prepared_form(folder: Path, segment: Segment) -> Path:
    return folder / Path(segment.file).stem / MODEL_FILE


def _segment_request(request: EngineRequest, folder: Path, segment: Segment) -> EngineRequest:
    data = os.path.realpath(Path(request.model).parent)
    config = {_SHARED_ARENA: "1", FOLDER_KEY: data, **request.options.session_config}
    wanted = request.with_options(session_config=config, prepare="never")
    return replace(wanted, model=str(folder / segment.file))


@contextmanager
def _segments(request: EngineRequest, folder: Path | None) -> Iterator[tuple[RankPlan, Path]]:
    """A rank's plan and the folder of its segments; of a slice in a file, for as long as it is used."""
    if folder is not None:
        yield RankPlan.read(folder), folder
        return
    from mcinfer.ranks.slicing.segments import cut_segments  # imports onnx: others do not need it

    with suppress(OSError):  # that names a file that does not exist or cannot be read
        check_regular(request.model)
    with PrivateFolder() as private:
        yield cut_segments(request.model, private.path), Path(private.path)


class RankEngine(Engine):
    """One rank of a sliced model. All ranks make it, and call `execute` of equal runs in the same order.

    With more than one thread, each session has threads of its own, which sleep between its runs. The
    runtime's pool for several sessions is one for the whole process, of one size, and gains little (a product
    of 64 by 512 by 512 takes two threads 201 instead of 253 µs).

    Attributes:
        plan: The steps of this rank.
        group: All ranks.
        uses: Who needs each value.
        links: What this rank passes to other stages.
        stage: The ranks of this rank's stage; the same object as `group` if there is one stage.
        arena: The layouts.
        closes: Whether a barrier ends each run, since a rank can fail after the last exchange.
        held: Names of the outputs that have memory in this rank.
        parity: The parity of the exchanges that ran last.
        entry: The entry of the cache whose files it maps, if any; closed with it.
    """

    entry: Held | None = None

    def __init__(
        self,
        request: EngineRequest,
        group: Group,
        folder: Path | None = None,
        *,
        deliver_everywhere: bool = True,
    ) -> None:
        """Load the slice `request.model`, and wait until all ranks have loaded theirs.

        Args:
            request: The slice, and how to run it.
            group: All ranks; this rank's number is that of the slice.
            folder: The folder with this rank's plan and segments; None: the slice is a file, and is cut now.
            deliver_everywhere: Whether each rank gets all outputs. If not, the first rank of a stage gets
                those that its stage makes, and the stages overlap: that a run has ended in one rank does not
                say that it has in others.

        Raises:
            BuildError: A rank could not load its slice, or the slices do not fit together.
            MissingDependencyError: The package onnx is needed and not installed.
        """
        self.turn = Turn()
        self.group = group
        self.parity = 1
        try:
            with _segments(request, folder) as (plan, source):
                self.plan = plan
                self._check(request)
                self.segments = {
                    index: _open(request, source, step)
                    for index, step in enumerate(plan.steps)
                    if isinstance(step, Segment)
                }
            self.spec = plan.spec
            self.providers = next((engine.providers for engine in self.segments.values()), ())
            self.uses = Uses(plan)
            exchanging = self.uses.phases - 1
            self.phases = [max(0, min(step.phase, exchanging)) for step in plan.steps]
            roots = self._roots()
            shared = deliver_everywhere and plan.pipeline > 1
            self._delivered = roots if shared else {}
            self.tensor = group.size // plan.pipeline
            ends = bool(plan.steps) and isinstance(plan.steps[-1], Segment)
            self.closes = deliver_everywhere and plan.pipeline == 1 and ends
            names = [spec.name for spec in plan.spec.outputs]
            self.held = [name for name in names if shared or name in plan.made]
            if not deliver_everywhere:
                is_first = group.rank % self.tensor == 0
                self.gives = frozenset(self.held if is_first else ())
            stages = range(0, group.size, self.tensor) if plan.pipeline > 1 else ()
            groups = [group.subgroup(range(start, start + self.tensor)) for start in stages]
            self.stage = next(filter(None, groups), group)
            self._begin_layouts()
        except Exception as exc:
            break_off(group, exc)  # the others wait for this rank
            raise

    def _check(self, request: EngineRequest) -> None:
        """Raise `BuildError` unless the slice is for this rank of this group."""
        plan, group = self.plan, self.group
        if request.options.variable_weights:
            raise BuildError(
                f"variable_weights: got {[*request.options.variable_weights]}, but weights of a sliced "
                "model cannot be replaced"
            )
        ranks = (plan.tensor or group.size // plan.pipeline) * plan.pipeline
        if ranks != group.size:
            raise BuildError(f"{request.model} is for {ranks} ranks, got a group of {group.size}")
        if plan.rank is not None and plan.rank != group.rank:
            raise BuildError(
                f"{request.model} is the slice of rank {plan.rank}, got rank {group.rank}"
            )

    def _roots(self) -> dict[str, int]:
        """For each output that is no input, the first rank that makes it; waits for all ranks."""
        given = {spec.name for spec in self.spec.inputs}
        names = [spec.name for spec in self.spec.outputs if spec.name not in given]
        made = np.array([[name in self.plan.made for name in names]], np.uint8)
        try:
            makers = self.group.all_gather(made)
        except PeerFailedError as exc:
            raise BuildError(str(exc)) from exc
        missing = [name for name, column in zip(names, makers.T, strict=True) if not column.any()]
        if missing:
            raise BuildError(f"no slice makes the outputs {missing}")
        return {name: int(makers[:, index].argmax()) for index, name in enumerate(names)}

    def _begin_layouts(self) -> None:
        self.arena = Layouts(self.group, self.stage)
        self.links = StageLinks(self.plan, self.group, self._delivered)

    def make_room(self) -> None:
        """Forget the layouts if there are too many; all ranks do this at once."""
        if len(self.arena.layouts) == MAX_LAYOUTS:
            for group in dict.fromkeys([self.group, self.stage]):
                group.forget()
            self._begin_layouts()

    def bind(self, inputs: Sequence[Buffer | Strings], outputs: Sequence[Buffer]) -> BoundRun:
        check_inputs(self.spec, inputs)
        return _RankRun(self, inputs, outputs)

    def arm(self) -> None:
        """Nothing to do: see `cancel`."""

    def cancel(self) -> None:
        """Does nothing: a run that ended in one rank alone would be a failure of all."""

    def skip(self, exc: Exception) -> None:
        if not isinstance(exc, InvalidInputError):  # which all ranks raise
            self.give_up(exc)

    def check_open(self) -> None:
        """Raise `ClosedError` if the group is closed."""
        if self.broken:
            raise ClosedError(f"the group is closed: {self.broken}")

    def give_up(self, exc: BaseException) -> None:
        """End the group after an error, so that no other rank waits for this one."""
        if not self.broken:
            self.broken = break_off(self.group, exc)

    def close(self) -> None:
        """Leave the group."""
        self.broken = self.broken or "this rank closed it"
        self.group.close()
        if self.entry is not None:
            self.entry.close()


def break_off(group: Group, exc: BaseException) -> str:
    """Close a group because of an error, for all ranks; in words, with the rank that it is of."""
    if isinstance(exc, (RankDiedError, CollectiveTimeoutError)):
        group.close_for(exc)
        return str(exc)
    text = shortened(str(exc) or repr(exc))
    if not isinstance(exc, PeerFailedError | ClosedError) and not is_of_another_rank(exc):
        text = f"rank {group.rank} (pid {os.getpid()}) failed: {text}"
    group.break_off(text)
    return text


def is_of_another_rank(exc: BaseException) -> bool:
    """Whether another rank could not load its slice."""
    return isinstance(exc.__cause__, PeerFailedError)


def _all_well(group: Group, is_well: bool) -> bool:
    """Whether all ranks of a group say that they are; all of them call this."""
    return bool(group.all_reduce(np.array([not is_well], np.int64), "max")[0] == 0)


def _open(request: EngineRequest, folder: Path, segment: Segment) -> Engine:
    prepared = _prepared_form(folder, segment)
    preparation = Preparation(path=prepared if prepared.exists() else None)
    return _onnxruntime.load(_segment_request(request, folder, segment), preparation)


def _copied(value: Buffer | Strings) -> Produced | Strings:
    """An output that is an input, which may change after the run."""
    if isinstance(value, Strings):
        return value
    copy = owned(value.name, value.element_type, value.shape)
    ctypes.memmove(copy.address, value.address, value.size)
    return copy


def _array(name: str, values: Values) -> NDArray[np.generic]:
    value = values[name]
    if isinstance(value, Strings):
        raise PredictError(f"value {name!r} is of strings, which ranks do not exchange")
    return array_over(value)


_Step = Callable[[], Sequence[Produced | Strings] | None]


def _bound_steps(
    engine: RankEngine, layout: PlanMemory, start: int, places: Values
) -> Sequence[_Step]:
    """The steps of a run, bound to the memory of a layout; none if the layout is not bound.

    Each returns the values that did not fit their places.

    Args:
        engine: Of the rank.
        layout: Of the inputs' shapes.
        start: The parity of the first exchanges.
        places: Where each value lies; gets those that lie in the memory of collectives.
    """
    if not layout.is_bound:
        return ()
    uses, collectives = engine.uses, layout.collectives[start]

    def place(name: str, memory: NDArray[np.generic]) -> None:
        like = layout.buffer(name)
        places[name] = tensor_in(memory, name, like.element_type, like.shape)

    for index, collective in collectives.items():
        step = engine.plan.steps[index]
        if step.inputs[0] in uses.straight_in:
            place(step.inputs[0], collective.input)
        if step.outputs[0] in uses.straight_out:
            place(step.outputs[0], collective.output)

    def segment(index: int, step: Segment) -> _Step:
        inputs = [places[name] for name in step.inputs]
        outputs = (places[name] for name in step.outputs)
        tensors = [item for item in outputs if isinstance(item, Buffer)]
        return engine.segments[index].bind(inputs, tensors).execute

    def exchange(collective: Collective, step: Exchange) -> _Step:
        run = collective.run
        source = None if step.input in uses.straight_in else _array(step.input, places)
        target = None if step.output in uses.straight_out else _array(step.output, places)

        def copy_and_run() -> None:
            if source is not None:
                np.copyto(collective.input, source)
            run()
            if target is not None:
                np.copyto(target, collective.output)

        return copy_and_run

    return [
        segment(index, step) if isinstance(step, Segment) else exchange(collectives[index], step)
        for index, step in enumerate(engine.plan.steps)
    ]


class _RankRun(BoundRun):
    """A layout of the whole model's inputs and outputs, in one rank."""

    def __init__(
        self,
        engine: RankEngine,
        inputs: Sequence[Buffer | Strings],
        outputs: Sequence[Buffer],
    ) -> None:
        self._engine = engine
        self._inputs: Values = {item.name: item for item in inputs}
        given = engine.held if engine.gives is None else engine.gives
        self._bound = {item.name: item for item in outputs if item.name in given}
        self._given = [name for name in engine.held if name in given]
        self._key = tuple(item.shape for item in inputs)
        self._failure: Exception | None = None
        self._layout: PlanMemory | None = None
        self._outputs: Values = {}
        self._programs: dict[int, tuple[Values, Sequence[_Step]]] = {}

    def execute(self) -> Sequence[Produced | Strings]:
        engine = self._engine
        engine.check_open()
        self._failure = None
        try:
            layout = engine.arena.layouts.get(self._key)
            if layout is None:
                found = self._learn()
            else:
                layout.runs += 1
                found = self._run_laid_out(layout)
        except BaseException as exc:
            engine.give_up(exc)
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return found

    # Without fixed memory.

    def _learn(self) -> Sequence[Produced | Strings]:
        """The first run with these shapes; at its end, all ranks make the layout, or none does.

        The ranks agree before they meet: in a master's group, a segment that fails in one leaves all in step.
        """
        engine = self._engine
        engine.make_room()
        arena, links = engine.arena, engine.links
        received = links.receive(None, {})
        values = {**self._inputs, **(received or {})}
        is_well = self._run_steps(values, 0, is_well=received is not None, learns=True)
        links.send(None, values if is_well else None)
        if not _all_well(arena.whole, is_well):
            return ()
        values |= links.deliver(None, {}, values)
        layout = PlanMemory(engine.plan, engine.uses, arena, values)
        links.prepare(layout)
        arena.layouts[self._key] = layout
        return self._results(values)

    def _run_steps(
        self, values: Values, first: int, *, is_well: bool = True, learns: bool = False
    ) -> bool:
        """Run the steps from `first` on, and add what they make to the values; whether that went well.

        Only a run that `learns` may go badly and leave the ranks in step.
        """
        engine, tensor = self._engine, self._engine.arena.tensor
        for index, step in enumerate(engine.plan.steps[first:], first):
            if isinstance(step, Exchange):
                if learns and not _all_well(tensor, is_well):
                    return False
                found = run_once(tensor, step, _array(step.input, values))
                kind = element_type_name(found.dtype)
                values[step.output] = tensor_in(found, step.output, kind, found.shape)
            elif is_well:
                try:
                    run = engine.segments[index].bind([values[name] for name in step.inputs], [])
                    values.update((item.name, item) for item in run.execute())
                except Exception as exc:
                    if not learns or engine.gives is None:
                        raise
                    self._failure, is_well = exc, False
        return not learns or _all_well(tensor, is_well)

    # With the layout's memory.

    def _program(self, layout: PlanMemory, start: int) -> tuple[Values, Sequence[_Step]]:
        """Where values lie, and the steps bound to the layout's memory, which begin with a parity."""
        if layout is not self._layout:  # the run's first layout, or that of a new arena
            self._layout = layout
            self._programs = {}
            self._outputs = {}
            for name in self._engine.held:
                like = layout.values[name]
                if isinstance(like, Buffer) and name not in self._inputs:
                    place = self._bound.get(name)
                    if place is None or place.shape != like.shape:
                        place = owned(name, like.element_type, like.shape)
                    self._outputs[name] = place
        if start not in self._programs:
            places = {**self._inputs, **self._outputs, **layout.memory}
            self._programs[start] = (places, _bound_steps(self._engine, layout, start, places))
        return self._programs[start]

    def _run_laid_out(self, layout: PlanMemory) -> Sequence[Produced | Strings]:
        engine, links = self._engine, self._engine.links
        start, done = 1 - engine.parity, 0
        places, steps = self._program(layout, start)
        values = places
        changed = links.receive(layout, values) or {}
        for step in steps if layout.is_bound and not changed else ():
            done += 1
            try:
                left = step()
            except Exception as exc:
                if engine.gives is None or isinstance(engine.plan.steps[done - 1], Exchange):
                    raise
                self._failure = self._failure or exc  # in a master's group, the segment is skipped
                continue
            if left:
                changed = {item.name: item for item in left}
                break
        if layout.is_bound and engine.phases:
            engine.parity = (start + engine.phases[max(done - 1, 0)]) % 2
        if changed or not layout.is_bound:  # other shapes than those of the first run
            layout.is_bound = False
            values = {**values, **changed}
            self._run_steps(values, done)
        if engine.closes:
            engine.arena.tensor.barrier()
        links.send(layout, values)
        changed = links.deliver(layout, places, values)
        return self._results({**self._outputs, **values, **changed})

    def _results(self, values: Values) -> Sequence[Produced | Strings]:
        found = [
            _copied(self._inputs[name]) if name in self._inputs else values[name]
            for name in self._given
        ]
        # A buffer of the caller's has its value already.
        return delivered(
            [item for item in found if isinstance(item, Produced | Strings)], self._bound
        )
