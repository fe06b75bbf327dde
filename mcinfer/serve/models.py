"""The models of a server: their files, their masters, and changes while requests come.

A model is a file, or a folder of a repository in Triton's layout: ``NAME/VERSION/model.onnx``, and maybe
``NAME/config.pbtxt``; its highest version is served. A load opens the new master first. Then new requests go
to it, and the old one is closed after its last answer: no request is lost, and for a while there are two.

Ownership: `Models` owns the masters of its instances. One task at a time changes a model.
"""

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format

from mcinfer.config import CARD_KINDS, Device, EngineOptions, Limits, Timeouts
from mcinfer.errors import InvalidInputError, McinferError
from mcinfer.master import Master
from mcinfer.serve.messages import message
from mcinfer.serve.tensors import DATATYPES, shape_of
from mcinfer.specs import STRING

_log = logging.getLogger("mcinfer.serve")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_CONFIG = "config.pbtxt"

_ENGINES = {
    "onnxruntime": ("onnxruntime_onnx", "model.onnx"),
    "openvino": ("openvino", "model.xml"),
}
"""By engine, which is Triton's *backend*, too: its *platform*, and the file in a version's folder."""

_MAX_DEVICES = 1024
"""Of a model, as for a number of devices; clients may give configurations."""

_MAX_CONFIG = 1 << 18
"""Characters of a client's configuration, a megabyte of which is read for a second."""

_LOWEST = -(1 << 31)
"""Priority of requests that say none, where the configuration says none."""


class RefusedError(McinferError):
    """What the server does not do, or not now. `status` is that of the answer over HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Instance:
    """One version of a model, while it is served; a context manager for each request that uses it.

    Attributes:
        master: Open while the instance is used.
        joins: Most rows of one run for several requests.
        usual_priority: Of requests that say none.
        config: ``ModelConfig`` as JSON.
        last: When a request last came, in seconds since 1970; 0 if none did.
        asked: By their JSON, requests that were checked; see `mcinfer.serve.inference.checked`.
    """

    def __init__(
        self, master: Master, version: str, joins: int, priority: int, config: dict[str, Any]
    ) -> None:
        self.master, self.version, self.joins = master, version, joins
        self.usual_priority, self.config = priority, config
        self.last = 0.0
        self.asked: dict[bytes, Any] = {}
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> None:
        self._users += 1
        self._unused.clear()

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def close(self) -> None:
        """Answer the requests that use it, and end its master."""
        await self._unused.wait()
        await asyncio.to_thread(self.master.close, drain=True)

    @property
    def ready(self) -> bool:
        return self.master.health().state in ("ready", "degraded")


class _Model:
    """A model by its name: its place, what serves it now, and why nothing does."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.instance: Instance | None = None
        self.reason = "not loaded"
        self.changing = asyncio.Lock()
        self.closing: set[asyncio.Task[None]] = set()

    def replace(self, new: Instance | None, reason: str = "") -> None:
        old, self.instance, self.reason = self.instance, new, reason
        if old is not None:
            task = asyncio.create_task(old.close())
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)


class Models:
    """The models of a server, by name.

    Args:
        files: By name, the models that are given by their files.
        repository: A folder of others, or None; models may come to it while the server runs.
        options: Of `Master`, by the model's name; a model's configuration goes before them.
        fixed: Options of `Master` that no configuration changes.
        opened: Is called with a master whose requests may be cut or joined before any comes.

    Raises:
        InvalidInputError: A name is none for an address; there is no such folder.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        repository: Path | None,
        options: Callable[[str], Mapping[str, Any]],
        opened: Callable[[Master], None] = lambda _: None,
        fixed: Mapping[str, Any] | None = None,
    ) -> None:
        for name in files:
            if not _NAME.fullmatch(name):
                raise InvalidInputError(f"name: got {name!r}, expected letters, digits, _, . and -")
        if repository is not None and not repository.is_dir():
            raise InvalidInputError(f"repository: {str(repository)!r} is no folder")
        self._repository, self._options, self._opened = repository, options, opened
        self._fixed = fixed or {}
        self._models = {name: _Model(file) for name, file in files.items()}
        self._look()

    def _look(self) -> None:
        """Note the models that came to the repository."""
        for entry in sorted(self._repository.iterdir()) if self._repository else ():
            if entry.name not in self._models and _NAME.fullmatch(entry.name) and entry.is_dir():
                self._models[entry.name] = _Model(entry)

    async def __aenter__(self) -> "Models":
        """Load all; if one fails, close all and raise its error."""
        loads = [asyncio.create_task(self.load(name)) for name in self._models]
        try:
            await asyncio.gather(*loads)
        except BaseException:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all masters at once, with the requests that they have; see `drain`."""
        masters = [instance.master for instance in self.loaded().values()]
        await asyncio.gather(*(asyncio.to_thread(master.close) for master in masters))
        await self.drain()

    async def drain(self) -> None:
        """Take no more requests, answer those that came, and end the masters."""
        for model in self._models.values():
            async with model.changing:
                model.replace(None, "the server ends")
        await asyncio.gather(*(task for model in self._models.values() for task in model.closing))

    async def load(self, name: str, config: str | None = None) -> None:
        """Serve a model's highest version, with a configuration in JSON in place of its file's.

        Raises:
            RefusedError: It cannot be loaded; what was served stays.
        """
        with suppress(OSError):
            self._look()
        model = self._models.get(name)
        if model is None:
            raise RefusedError(400, f"failed to load '{name}', no such model is known")
        async with model.changing:
            try:
                model.replace(await self._open(name, model.place, config))
            except (McinferError, OSError) as exc:
                model.reason = str(exc)
                raise RefusedError(400, f"failed to load '{name}', {exc}") from exc

    async def unload(self, name: str) -> None:
        """Take no more requests; those that came are answered."""
        self.instance(name)
        async with self._models[name].changing:
            self._models[name].replace(None, "unloaded")

    def instance(self, name: str, version: str = "") -> Instance:
        """What takes requests for a model; `RefusedError` if nothing does, or not of this version."""
        model = self._models.get(name)
        found = None if model is None else model.instance
        if found is None or version not in ("", found.version):
            why = "is not found" if model is None else model.reason
            why = f"is not served in version {version}, but in {found.version}" if found else why
            raise RefusedError(404, f"Request for unknown model: '{name}' {why}")
        return found

    def loaded(self) -> dict[str, Instance]:
        return {n: model.instance for n, model in self._models.items() if model.instance}

    def index(self) -> list[dict[str, str]]:
        """All models that are known, with their state."""
        with suppress(OSError):  # a repository that is not there now
            self._look()
        entries = []
        for name, model in self._models.items():
            entry = {"name": name, "state": "UNAVAILABLE", "reason": model.reason}
            if model.instance is not None:
                entry |= {"version": model.instance.version, "state": "READY"}
            entries.append(entry)
        return entries

    async def _open(self, name: str, place: Path, override: str | None) -> Instance:
        options, version = {"max_batch_size": 1, **self._options(name)}, "1"
        config, rows = message("ModelConfig")(), options["max_batch_size"]
        if override is not None or (place.is_dir() and (place / _CONFIG).exists()):
            _read_config(config, place / _CONFIG, override)
            options |= _options(config, options)
            rows = config.max_batch_size
        options |= self._fixed
        if config.name not in ("", name):
            raise InvalidInputError(f"name: got {config.name!r}, expected {name!r}")
        engine = options.get("engine")
        if place.is_dir():
            found = [p.name for p in place.iterdir() if p.is_dir() and _VERSION.fullmatch(p.name)]
            version = max(found, key=int, default="1")
            usual = _ENGINES.get(engine or "", _ENGINES["onnxruntime"])[1]
            own = config.default_model_filename or usual
            if Path(own).name != own:
                raise InvalidInputError(f"default_model_filename: got {own!r}, expected a name")
            place = place / version / own
        options["engine"] = engine or ("openvino" if place.suffix == ".xml" else "onnxruntime")
        chosen, allowed = options.get("options", EngineOptions()), os.sched_getaffinity(0)
        if any(not allowed.issuperset(cores) for cores in chosen.cores or ()):
            # They were taken after the server's start: the workers share out what is left.
            text = "%s: the server gave it the cores %s, and %s are allowed now"
            _log.warning(text, name, chosen.cores, sorted(allowed))
            options["options"] = replace(chosen, cores=None)
        master = Master(place, **options)
        await master.__aenter__()
        try:
            if options["max_batch_size"] > 1 or len(master.statistics().workers) > 1:
                await asyncio.to_thread(self._opened, master)
        except BaseException:
            await asyncio.to_thread(master.close)
            raise
        priority = -config.dynamic_batching.default_priority_level or _LOWEST
        described = _described(name, master, rows, options)
        described["default_model_filename"] = place.name
        return Instance(master, version, options["max_batch_size"], priority, described)


def _read_config(config: Any, file: Path, override: str | None) -> None:
    """Read a configuration, past what mcinfer does not know."""
    if override and len(override) > _MAX_CONFIG:
        raise InvalidInputError(f"config: it has more than {_MAX_CONFIG} characters, the limit")
    try:
        if override is None:
            text = file.read_text("utf-8", "replace")
            text_format.Parse(text, config, allow_unknown_field=True)
        else:
            json_format.Parse(override, config, ignore_unknown_fields=True)
    except (text_format.ParseError, json_format.ParseError, RecursionError) as exc:
        raise InvalidInputError(f"config: it is no model configuration: {exc}") from exc


def _options(config: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Master` that a configuration says; as with Triton, it says whether to join requests."""
    dynamic, devices = config.dynamic_batching, _devices(config)
    policy, joins = dynamic.default_queue_policy, config.HasField("dynamic_batching")
    options: dict[str, Any] = {
        "max_batch_size": max(1, config.max_batch_size) if joins else 1,
        "max_delay": dynamic.max_queue_delay_microseconds / 1e6,
    }
    if said := config.backend or config.platform:
        engines = [e for e, (platform, _) in _ENGINES.items() if said in (e, platform)]
        if not engines:
            raise InvalidInputError(f"backend: got {said!r}, expected one of {[*_ENGINES]}")
        options["engine"] = engines[0]
    if devices:
        options["devices"] = devices
    if queue := policy.max_queue_size:
        options["limits"] = replace(before.get("limits", Limits()), queue=queue)
    if micro := policy.default_timeout_microseconds:
        options["timeouts"] = replace(before.get("timeouts", Timeouts()), predict=micro / 1e6)
    return options


def _devices(config: Any) -> list[str]:
    """The devices of the instance groups: one for each instance that they count."""
    devices: list[str] = []
    for group in config.instance_group:
        kind, count = type(group).Kind.Name(group.kind), group.count or 1
        if len(devices) + count * max(1, len(group.gpus)) > _MAX_DEVICES:
            raise InvalidInputError(f"instance_group: expected at most {_MAX_DEVICES} instances")
        if count < 0 or kind == "KIND_MODEL":
            text = f"instance_group: got count {count} of {kind}, expected 1 or more of KIND_CPU,"
            raise InvalidInputError(f"{text} KIND_GPU or KIND_AUTO")
        if group.gpus or kind == "KIND_GPU":
            devices += [f"cuda:{card}" for card in group.gpus or [0] for _ in range(count)]
        else:
            start = sum(device.startswith("cpu") for device in devices)
            devices += [f"cpu:{start + i}" for i in range(count)]
    return devices


def _described(name: str, master: Master, rows: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a loaded model; the sizes of its tensors leave out that of a batch."""
    tensors = (*master.inputs, *master.outputs)
    batched = rows > 0 and all(s.shape and not isinstance(s.shape[0], int) for s in tensors)
    workers = [Device.parse(worker.device) for worker in master.statistics().workers]
    cards = sorted({device.index for device in workers if device.kind in CARD_KINDS})
    known = message("ModelInput").DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_name
    described = []
    for spec in tensors:
        kind = "TYPE_" + DATATYPES[spec.element_type].replace("BYTES", STRING.upper())
        kind = kind if kind in known else "TYPE_INVALID"
        sizes = shape_of(spec)[int(batched) :]
        described.append({"name": spec.name, "data_type": kind, "dims": sizes})
    count = len(workers) // (len(cards) or 1)
    kind = "KIND_GPU" if cards else "KIND_CPU"
    config: dict[str, Any] = {
        "name": name,
        "platform": _ENGINES.get(options["engine"], ("",))[0],
        "backend": options["engine"],
        "max_batch_size": rows if batched else 0,
        "input": described[: len(master.inputs)],
        "output": described[len(master.inputs) :],
        "instance_group": [{"name": name, "kind": kind, "count": count, "gpus": cards}],
    }
    if options["max_batch_size"] > 1:
        micro = round(options["max_delay"] * 1e6)
        config["dynamic_batching"] = {"max_queue_delay_microseconds": micro}
    return config
