"""The models of a server: their files, their masters, and changes while requests come.

A model is a file, or a folder of a repository in Triton's layout: ``NAME/VERSION/model.onnx``, and maybe
``NAME/config.pbtxt``, which says which versions are served: the highest, or several, each by a master of its
own. A load opens the new masters first. Then new requests go to them, and the old ones are closed after their
last answers: no request is lost, and for a while there are both.

Ownership: `Models` owns the masters of its instances, and the task that looks at the repository for changes.
One task at a time changes a model.
"""

import asyncio
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from mcinfer.config import CARD_KIND, Device, EngineOptions
from mcinfer.engines.names import DEFAULT_ENGINE, ENGINES, engines_for
from mcinfer.errors import BuildError, InvalidInputError, McinferError, Refusal
from mcinfer.logs import about
from mcinfer.master import Master
from mcinfer.serve.configuration import Configuration, Reshape, type_name
from mcinfer.serve.documents import IndexEntry
from mcinfer.serve.tensors import shape_of
from mcinfer.specs import TensorSpec
from mcinfer.statistics import TraceHook

_log = logging.getLogger("mcinfer.serve")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")

_YOUNG = 10_000
"""Objects that come before the collector looks at them: a request in flight has dozens, and frees them."""


LOG_SAYS = "the server's log says why"
"""In answers, in the place of texts that may name files of the server."""

_REFUSALS: dict[int, Refusal] = {400: "invalid", 413: "too_large", 415: "invalid"}


class RefusedError(McinferError):
    """What the server does not do, or not now.

    Attributes:
        status: Of the answer over HTTP.
        public: What the answer says; the error's own text is for the log.
    """

    def __init__(self, status: int, text: str, public: str = "") -> None:
        super().__init__(text)
        self.status, self.public = status, public or text
        self.refusal = _REFUSALS.get(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Which models are loaded at the start, and who changes them afterwards.

    Attributes:
        first: Those of the repository that are loaded at the start; None: all.
        exit_on_error: Whether one that cannot be loaded ends the start; None: if it is in `first`, or a file.
        by_clients: Whether clients may load and unload models.
        poll: Seconds between two looks at the repository for changes; 0: there are none.
    """

    first: Collection[str] | None = None
    exit_on_error: bool | None = None
    by_clients: bool = True
    poll: float = 0.0


class Instance:
    """One version of a model, while it is served; a context manager for each request that uses it.

    Attributes:
        master: Open while the instance is used.
        joins: Most rows of one run for several requests.
        usual_priority: Of requests that say none.
        config: ``ModelConfig`` as JSON.
        inputs, outputs: As clients see them.
        input_reshapes, output_reshapes: By name, how the shapes of some change between clients and the model.
        last: When a request last came, in seconds since 1970; 0 if none did.
        asked: By their JSON, requests that were checked; see `mcinfer.serve.inference.checked`.
        files: Those that it was loaded from, if the server looks for changes.
        refused: Requests that were refused before the master had them, by reason.

    Raises:
        InvalidInputError: The model is not as its configuration says.
    """

    config: dict[str, Any]

    def __init__(
        self, master: Master, version: str, joins: int, configuration: Configuration
    ) -> None:
        self.master, self.version, self.joins = master, version, joins
        self.usual_priority = configuration.priority
        self.inputs, self.input_reshapes = configuration.seen("input", master.inputs)
        self.outputs, self.output_reshapes = configuration.seen("output", master.outputs)
        self.last = 0.0
        self.asked: dict[bytes, Any] = {}
        self.files: _Files = {}
        self.refused: Counter[str] = Counter()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> None:
        self._users += 1
        self._unused.clear()

    def __exit__(self, _: object, exc: BaseException | None, *__: object) -> None:
        if isinstance(exc, McinferError) and exc.refusal:
            self.refused[exc.refusal] += 1
        self._users -= 1
        if not self._users:
            self._unused.set()

    def to_model(self, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Inputs as the model takes them, of inputs as clients give them."""
        reshapes = self.input_reshapes
        return {
            name: array.reshape(reshapes[name].to_model(array.shape)) if name in reshapes else array
            for name, array in arrays.items()
        }

    def warm_up(self, configuration: Configuration) -> None:
        """Run on every worker what the configuration says; it may read files."""
        for times, inputs in configuration.warm_ups(self.inputs):
            for _ in range(times):
                self.master.warm_up(self.to_model(inputs))

    async def close(self) -> None:
        """Answer the requests that use it, and end its master."""
        await self._unused.wait()
        await asyncio.to_thread(self.master.close, drain=True)

    @property
    def ready(self) -> bool:
        return self.master.health().state in ("ready", "degraded")


_Files = dict[str, list[tuple[str, int, int, int]]]


def _files_of(place: Path) -> _Files:
    """What differs once a file of a model is written, by what lies in its folder; nothing if that is gone."""
    found: _Files = {}
    for depth in ("*", "*/*", "*/*/*"):
        for file in sorted(place.glob(depth)):
            with suppress(OSError):  # it has just gone
                about = file.stat()
                seen = (str(file), about.st_ino, about.st_size, about.st_mtime_ns)
                found.setdefault(file.relative_to(place).parts[0], []).append(seen)
    return found


class _Model:
    """A model by its name: its place, what serves it now, the highest version last, and why nothing does.

    Attributes:
        failed: Whether its load at the start did, and it has not been loaded since.
        seen, taken: Its files at the last look for changes, and when it was loaded.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.instances: dict[str, Instance] = {}
        self.reason, self.failed = "not loaded", False
        self.seen: _Files = {}
        self.taken: _Files = {}
        self.changing = asyncio.Lock()
        self.closing: set[asyncio.Task[None]] = set()

    def replace(self, new: dict[str, Instance], reason: str = "") -> None:
        old, self.instances, self.reason, self.failed = self.instances, new, reason, False
        for instance in {*old.values()} - {*new.values()}:
            task = asyncio.create_task(instance.close())
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)


class Models:
    """The models of a server, by name.

    Args:
        files: By name, the models that are given by their files.
        repository: A folder of others, or None; models may come to it while the server runs.
        options: Of `Master`, by the model's name; a model's configuration goes before them.
        fixed: Options of `Master` that no configuration changes; of ``options``, these fields.
        opened: Is called with a master whose requests may be cut or joined before any comes.
        control: Which models to load, and when.

    Attributes:
        trace: The trace hook of all masters; set before they are opened.

    Raises:
        InvalidInputError: A name is none for an address; there is no such folder, or no such model in it.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        repository: Path | None,
        options: Callable[[str], Mapping[str, Any]],
        opened: Callable[[Master], None] = lambda _: None,
        fixed: Mapping[str, Any] | None = None,
        control: Control = Control(),
    ) -> None:
        for name in files:
            if not _NAME.fullmatch(name):
                raise InvalidInputError(f"name: got {name!r}, expected letters, digits, _, . and -")
        if repository is not None and not repository.is_dir():
            raise InvalidInputError(f"repository: {str(repository)!r} is no folder")
        self._repository, self._options, self._opened = repository, options, opened
        self._fixed = fixed or {}
        self.trace: TraceHook | None = None
        self._models = {name: _Model(file) for name, file in files.items()}
        self._look()
        self._control = control
        self._polling: asyncio.Task[None] | None = None
        if unknown := {*(control.first or ())} - {*self._models}:
            text = f"models to load: got {sorted(unknown)}, expected some of {[*self._models]}"
            raise InvalidInputError(text)
        self._named = {*files, *(control.first or ())}
        self._served: Collection[str] = ()

    def needing(self, served: Collection[str]) -> "Models":
        """These, not loaded yet, of which the start needs those that another process serves."""
        other = copy(self)
        other._served = served
        return other

    def _look(self) -> None:
        """Note the models that came to the repository."""
        for entry in sorted(self._repository.iterdir()) if self._repository else ():
            if entry.name not in self._models and _NAME.fullmatch(entry.name) and entry.is_dir():
                self._models[entry.name] = _Model(entry)

    async def __aenter__(self) -> "Models":
        """Load those of the start; if one fails that the server needs, close all and raise its error.

        Those of the repository that have come or gone since this was made are taken as it is now.
        """
        self._look()
        for name, model in [*self._models.items()]:
            if name not in self._named and not model.place.exists():
                del self._models[name]
        first = self._models if self._control.first is None else self._named
        needed = {None: self._named, True: first, False: ()}[self._control.exit_on_error]
        needed = {*needed, *self._served}
        if self._control.poll:
            for model in self._models.values():
                model.seen = model.taken = _files_of(model.place)
        loads = [asyncio.create_task(self._begin(name, name in needed)) for name in first]
        try:
            await asyncio.gather(*loads)
        except BaseException:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
            await self.__aexit__()
            raise
        if self._control.poll:
            self._polling = asyncio.create_task(self._poll())
        return self

    async def _begin(self, name: str, needed: bool) -> None:
        try:
            await self._load(name)
        except RefusedError as exc:
            if needed:
                raise
            self._models[name].failed = True
            _log.error("%s", exc)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._control.poll)
            await self.catch_up()

    async def catch_up(self) -> None:
        """Take up what has changed in the repository, and has stood still since the call before.

        A model whose folder is gone takes no more requests.
        """
        try:
            self._look()
            own = {n: m for n, m in self._models.items() if m.place.parent == self._repository}
            files = await asyncio.to_thread(lambda: {n: _files_of(m.place) for n, m in own.items()})
        except OSError as exc:  # all may come again
            _log.warning("the repository cannot be read: %s", exc)
            return
        still = [n for n, m in own.items() if files[n] == m.seen != m.taken]
        for name, model in own.items():
            model.seen = files[name]
        for name in still:
            own[name].taken = files[name]
        await asyncio.gather(*(self._take_up(name, own[name]) for name in still))
        if still:
            settle()

    async def _take_up(self, name: str, model: _Model) -> None:
        if not model.taken:
            async with model.changing:
                model.replace({}, "its folder is gone")
            return
        try:
            await self._load(name)
        except RefusedError as exc:
            _log.error("%s", exc)

    async def __aexit__(self, *_: object) -> None:
        """End all masters at once, with the requests that they have; see `drain`."""
        if self._polling:
            self._polling.cancel()
        masters = [instance.master for _, instance in self.loaded()]
        await asyncio.gather(*(asyncio.to_thread(master.close) for master in masters))
        await self.drain()

    async def drain(self) -> None:
        """Take no more requests, answer those that came, and end the masters."""
        if self._polling:
            self._polling.cancel()
        for model in self._models.values():
            async with model.changing:
                model.replace({}, "the server ends")
        await asyncio.gather(*(task for model in self._models.values() for task in model.closing))

    async def load(self, name: str, config: str | None = None) -> None:
        """Serve a model's versions, as a client wants, with a configuration in JSON in place of its file's.

        Raises:
            RefusedError: One of them cannot be loaded, and what was served stays; or no client may load any.
        """
        self._check_control()
        with suppress(OSError):
            self._look()
        await self._load(name, config)
        settle()

    def _check_control(self) -> None:
        if not self._control.by_clients:
            text = "explicit model load / unload is not allowed if polling is enabled, or nothing"
            raise RefusedError(400, f"{text} changes models: see --model-control-mode")

    async def _load(self, name: str, config: str | None = None) -> None:
        model = self._models.get(name)
        if model is None:
            raise RefusedError(400, f"failed to load '{name}', no such model is known")
        async with model.changing:
            try:
                model.replace(await self._open(name, model.place, config))
            except (McinferError, OSError, MemoryError) as exc:
                is_own = isinstance(exc, InvalidInputError) and not exc.by_runtime
                model.reason = str(exc) if is_own else LOG_SAYS
                text = f"failed to load '{name}', "
                raise RefusedError(400, f"{text}{exc}", text + model.reason) from exc

    async def unload(self, name: str) -> None:
        """Take no more requests, as a client wants; those that came are answered."""
        self._check_control()
        self.instance(name)
        async with self._models[name].changing:
            self._models[name].replace({}, "unloaded")

    def instance(self, name: str, version: str = "") -> Instance:
        """What takes requests for a model, in its highest version if none is named.

        Raises:
            RefusedError: Nothing does, or not of this version.
        """
        model = self._models.get(name)
        served = model.instances if model else {}
        found = served.get(version) if version else next(reversed(served.values()), None)
        if found is None:
            why = model.reason if model else "is not found"
            if served:
                why = f"is not served in version {version[:200]}, but in {', '.join(served)}"
            raise RefusedError(404, f"Request for unknown model: '{name[:200]}' {why}")
        return found

    def loaded(self, name: str = "") -> list[tuple[str, Instance]]:
        """What takes requests, with its model's name: of one model, or all; the highest version last."""
        models = {name: self._models[name]} if name else self._models
        return [(n, each) for n, model in models.items() for each in model.instances.values()]

    @property
    def ready(self) -> bool:
        """Whether all can answer: those that are loaded, and those that were to be at the start."""
        ready = all(instance.ready for _, instance in self.loaded())
        return ready and not any(model.failed for model in self._models.values())

    def index(self) -> list[IndexEntry]:
        """All versions that are served, and the models that are known of which there are none."""
        with suppress(OSError):  # a repository that is not there now
            self._look()
        entries: list[IndexEntry] = []
        for name, model in self._models.items():
            entry: IndexEntry = {"name": name, "state": "UNAVAILABLE", "reason": model.reason}
            ready: list[IndexEntry] = [
                {**entry, "version": v, "state": "READY"} for v in model.instances
            ]
            entries += ready or [entry]
        return entries

    async def _open(self, name: str, place: Path, override: str | None) -> dict[str, Instance]:
        """All versions of a model that are to be served, the highest last."""
        said = await asyncio.to_thread(Configuration, place, name, override)
        if said.passed_over:
            _log.warning(
                "%s: the configuration's %s: passed over", name, ", ".join(said.passed_over)
            )
        options = {"max_batch_size": 1, "trace": self.trace, **self._options(name)}
        options |= said.options(options)
        given = options.get("options", EngineOptions())
        options |= {**self._fixed, "options": replace(given, **self._fixed.get("options", {}))}
        engine, files = options.get("engine"), {"1": place}
        if place.is_dir():
            found = [p.name for p in place.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name)]
            own = said.file or ENGINES.get(engine or "", ENGINES[DEFAULT_ENGINE]).file
            files = {str(n): place / str(n) / own for n in said.versions([*map(int, found)])}
        chosen, allowed = options.get("options", EngineOptions()), os.sched_getaffinity(0)
        if any(not allowed.issuperset(cores) for cores in chosen.cores or ()):
            # They were taken after the server's start: the workers share out what is left.
            text = "%s: the server gave it the cores %s, and %s are allowed now"
            _log.warning(text, name, chosen.cores, sorted(allowed))
            options["options"] = replace(chosen, cores=None)
        opened: dict[str, Instance] = {}
        taken, served = self._models[name].taken, self._models[name].instances
        try:
            for version, file in files.items():
                # Those of the version, and of the model; none without polling.
                tops = {top for top in taken if top == version or not _VERSION.fullmatch(top)}
                now = {top: taken[top] for top in tops}
                if now and version in served and served[version].files == now:
                    opened[version] = served[version]
                    continue
                options["engine"] = engine or engines_for(file)[0]
                options["label"] = f"{name}/{version}"
                with about(options["label"]):
                    opened[version] = await self._open_version(name, version, file, said, options)
                opened[version].files = now
        except BaseException:
            new = [each for each in opened.values() if each not in served.values()]
            await asyncio.gather(*(each.close() for each in new))
            raise
        return opened

    async def _open_version(
        self, name: str, version: str, file: Path, said: Configuration, options: Mapping[str, Any]
    ) -> Instance:
        master = await _entered(file, options)
        try:
            instance = Instance(master, version, options["max_batch_size"], said)
            if options["max_batch_size"] > 1 or len(master.statistics().workers) > 1:
                await asyncio.to_thread(self._opened, master)
            await asyncio.to_thread(instance.warm_up, said)
            rows = said.rows if said.is_given else options["max_batch_size"]
            instance.config = _described(name, instance, rows, options)
            instance.config["default_model_filename"] = file.name
        except BaseException:
            await asyncio.to_thread(master.close)
            raise
        return instance


async def _entered(place: Path, options: Mapping[str, Any]) -> Master:
    try:
        master = Master(place, **options)
        await master.__aenter__()
    except InvalidInputError as exc:  # it may name files, unlike those of a configuration
        raise BuildError(str(exc)) from exc
    return master


def settle() -> None:
    """Have the garbage collector pass over what there is now: modules, and models that are loaded.

    What a model leaves behind is collected at the next load, and no sooner.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)


def _described(
    name: str, instance: Instance, rows: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration of a loaded model; the sizes of its tensors leave out that of a batch."""
    master, tensors = instance.master, (*instance.inputs, *instance.outputs)
    batched = rows > 0 and all(s.shape and not isinstance(s.shape[0], int) for s in tensors)
    workers = [Device.parse(worker.device) for worker in master.statistics().workers]
    cards = sorted({device.index for device in workers if device.kind == CARD_KIND})

    def tensor(spec: TensorSpec, reshapes: Mapping[str, Reshape]) -> dict[str, Any]:
        dims = shape_of(spec)[int(batched) :]
        about: dict[str, Any] = {"name": spec.name, "data_type": type_name(spec), "dims": dims}
        if spec.name in reshapes:
            about["reshape"] = {"shape": reshapes[spec.name].models[int(batched) :]}
        return about

    known = ENGINES.get(options["engine"])
    count = len(workers) // (len(cards) or 1)
    kind = "KIND_GPU" if cards else "KIND_CPU"
    config: dict[str, Any] = {
        "name": name,
        "platform": known.platform if known else "",
        "backend": options["engine"],
        "max_batch_size": rows if batched else 0,
        "input": [tensor(spec, instance.input_reshapes) for spec in instance.inputs],
        "output": [tensor(spec, instance.output_reshapes) for spec in instance.outputs],
        "instance_group": [{"name": name, "kind": kind, "count": count, "gpus": cards}],
    }
    if options["max_batch_size"] > 1:
        micro = round(options["max_delay"] * 1e6)
        config["dynamic_batching"] = {"max_queue_delay_microseconds": micro}
    return config
