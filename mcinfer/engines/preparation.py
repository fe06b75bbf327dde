"""Prepared models: whether a model needs one, where it is, and how to make it.

::

    facts (content of the model, runtime, CPU, options) ──► key ──► an entry of the cache, mapped by all
                                             Cache.make ◄────────────┘ none yet
    one process of all: Making.fill ──►  run_child ──► the adapter's `fill` writes the entry's folder

A process that waits for the entry makes it. One that does not wait loads the model as it is; of all these,
one (`Cache.claim`) starts another process (`run_beside`), which makes the entry and may outlive it.

A model that cannot be prepared is loaded as it is, and the engine's `notes` say why. If a runtime cannot
save a model's optimised form, an entry without a model records this, so that mcinfer tries only once.
"""

import hashlib
import json
import logging
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from mcinfer.checks import as_map, from_map
from mcinfer.config import Device, EngineOptions
from mcinfer.engines.base import EngineRequest
from mcinfer.engines.providers import NAMES, device_error, graph_options, provider_of
from mcinfer.errors import (
    BuildError,
    InvalidInputError,
    McinferError,
    MissingDependencyError,
    shortened,
)
from mcinfer.model_cache import FOLDER_KEY, LEAST_PREPARED_BYTES, is_large, model_bytes
from mcinfer.model_cache.cache import (
    ABOUT_FILE,
    FAILURE_FILE,
    Cache,
    CacheUnusableError,
    Held,
    disk_bytes,
    entry_key,
    is_entry,
)
from mcinfer.model_cache.children import ChildFailedError, Progress, run_beside, run_child
from mcinfer.model_cache.keys import ModelContent, claim_key, model_content
from mcinfer.model_cache.onnx_files import added_inputs, check_regular, scan
from mcinfer.private import in_words, inherited, model_name, naming_limit

_MAX_GROWTH = 4
_MAX_ADDED_BYTES = 1 << 30
"""Limits of a prepared model's size: weights are unpacked from one byte to four, and constants are computed;
without a limit, a model of a few bytes could fill the disk."""

_LEAST_SECONDS = 600.0
_LEAST_BYTES_PER_SECOND = 5e6
"""Time limit of preparing, for models whose constants compute for ever."""

DRAFT = re.compile(r"tmp-[0-9a-f]{32}-\w+(/\w+)?")

FELL_BACK = "the runtime fell back"
"""Of a device that it could not use this time."""

_SHORT_OF_SOMETHING = re.compile(
    r"bad_alloc|[Ff]ailed to allocate|Cannot allocate|No space left|Input/output error|"
    r"Too many open files|Resource temporarily unavailable|Permission denied|pthread|"
    rf"CUDA failure|CUBLAS failure|CUDNN failure|{FELL_BACK}"
)
"""Messages of a runtime whose cause may be gone at the next try."""

_LOADED_BYTES_PER_SECOND = 5e7
_MAX_LOADING_SECONDS = 60.0
"""How long the processes of a service that start together take to load a model. One that prepares it beside
them needs memory of its own, for which no low priority makes it wait."""

_STUCK_SECONDS = 120.0
"""Longest wait for another process that makes no progress: less than `Timeouts.start`."""

_WARN_SECONDS = 4.0  # time until one warning says why the start is slow

_ADAPTER = "mcinfer.engines._onnxruntime"
"""Its functions are called in children, by their names: not all processes have the runtime."""

SLOW = "preparing %s once for this machine; later starts are quick"

_log = logging.getLogger("mcinfer.model_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The properties of a runtime that prepared models depend on.

    Attributes:
        version: Its name and version.
        build: Identifies a build of one version.
        ignored: Keys of session configurations without an effect on prepared models.
        providers: The execution providers that it was built with.
    """

    version: str
    build: str
    ignored: Sequence[str] = ()
    providers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How to load a model: its prepared form, or as it is.

    Attributes:
        held: The cache's entry with the prepared form, if it is in the cache.
        path: The file of the prepared form; None to load the model as it is.
        notes: Messages for the user.
        is_coming: Whether another process makes the prepared form, for those that start later.
    """

    held: Held | None = None
    path: Path | None = None
    notes: tuple[str, ...] = ()
    is_coming: bool = False


def find_or_make(
    request: EngineRequest,
    runtime: Runtime,
    progress: Progress | None = None,
    claim: int | None = None,
) -> Preparation:
    """The prepared form of the request's model; makes it, or has it made, if there is none yet.

    Args:
        request: The model, and how to load it.
        runtime: That of the engine which will load it.
        progress: Called while it is made.
        claim: The caller's `Cache.claim` of the model, if it has one.

    Raises:
        BuildError: The model is a prepared one already, for another runtime or CPU; or weights that are to be
            replaceable are none of its own.
    """
    if names := request.options.variable_weights:
        try:
            added_inputs(scan(request.model), names)
        except OSError as exc:
            raise BuildError(f"{request.model}: {exc}") from exc
    if is_entry(request.model):
        entry = Path(request.model).resolve().parent
        return Preparation(held=_adopt(entry, request, runtime))
    prepare, folder = request.options.prepare, request.options.session_config.get(FOLDER_KEY)
    if prepare == "never" or not _is_prepared_for(request):
        return Preparation()
    try:
        if prepare != "always" and not is_large(request.model, folder):
            return Preparation()
        content = content_of(request)
        facts = facts_of(request, runtime, content)
        # Sessions on a card cannot share their weights without it, so they wait.
        if prepare in ("auto", "background") and request.device.kind == "cpu":
            held = Cache.default().open(entry_key(facts))
            if held is None:
                return _make_beside(request, runtime, claim_key(content), claim)
        else:
            held = _making(request, content, progress).open(facts)
    except BuildError as exc:
        # The runtime refuses a file that is not a model, in better words; it takes a format of its own.
        said = prepare in ("background", "always")
        notes = (shortened(f"{OWN_COPY}: {exc}"),) if said else ()
        return Preparation(notes=notes)
    except (CacheUnusableError, ChildFailedError, MissingDependencyError, OSError) as exc:
        # Without random names: all workers then have the same note.
        return Preparation(notes=(f"{OWN_COPY}: {DRAFT.sub('…', shortened(str(exc)))}",))
    failure = held.folder / FAILURE_FILE
    if failure.exists():
        text = failure.read_text(encoding="utf-8")
        held.close()
        return Preparation(notes=(f"{OWN_COPY}: it cannot be prepared: {text}",))
    return Preparation(held=held)


def _making(request: EngineRequest, content: ModelContent, progress: Progress | None) -> "Making":
    return Making(
        function=f"{_ADAPTER}:fill",
        request=request,
        content=content,
        slow=SLOW,
        progress=progress,
        keeps_failure=True,
    )


def _make_beside(
    request: EngineRequest, runtime: Runtime, key: str, claim: int | None
) -> Preparation:
    """Have one process of all prepare a model; it is loaded as it is meanwhile."""
    cache, name = Cache.default(), in_words(request.model, request.model)
    claim, failure = cache.claim(key) if claim is None else (os.dup(claim), "")
    if failure:
        return Preparation(notes=(f"{OWN_COPY}: it could not be prepared lately: {failure}",))
    if claim is not None:

        def failed(error: str) -> None:
            cache.settle(key, error)  # one that was killed has not said so
            _log.warning("%s could not be prepared: %s", name, error)

        try:
            run_beside(
                make_claimed,
                [_plain(request), asdict(runtime), key],
                failed,
                pass_fds=(claim, *inherited(request.model)),
            )
        finally:
            os.close(claim)
        _log.info("preparing %s beside its sessions; those that start later map it", name)
    return Preparation(is_coming=True)


def _loading_seconds(size: int) -> float:
    return min(size / _LOADED_BYTES_PER_SECOND, _MAX_LOADING_SECONDS)


def make_claimed(
    _: Progress, plain: Mapping[str, Any], runtime: Mapping[str, Any], key: str
) -> None:
    """Prepare the model that this process has the claim of; at most one process does that at a time."""
    cache, request = Cache.default(), request_of(plain)
    folder = request.options.session_config.get(FOLDER_KEY)
    with suppress(McinferError, OSError):
        time.sleep(_loading_seconds(model_bytes(request.model, folder)))
    if not os.path.exists(request.model):  # a file of a moment: no failure to note for an hour
        cache.settle(key)
        return
    turn = cache.await_turn()
    try:
        content = content_of(request)
        facts = facts_of(request, Runtime(**runtime), content)
        _making(request, content, None).open(facts).close()
        cache.settle(key)
    except (McinferError, OSError) as exc:
        error = DRAFT.sub("…", shortened(str(exc)))
        cache.settle(key, error)
        raise ChildFailedError(error) from exc
    finally:
        os.close(turn)


OWN_COPY = "each process has a copy of the weights of its own"


def _is_prepared_for(request: EngineRequest) -> bool:
    """Whether models are prepared for this device: for a card, if its sessions share the weights."""
    if request.device.kind == "cuda" and request.options.provider in (None, "cuda"):
        return request.slab is not None or request.options.prepare == "always"
    return request.device.kind == "cpu"


def content_of(request: EngineRequest, *, any_format: bool = False) -> ModelContent:
    """The content of the request's model, read or remembered; raises as `model_content`."""
    if request.content is not None:
        return request.content
    folder = request.options.session_config.get(FOLDER_KEY)
    return model_content(request.model, folder, any_format=any_format)


def readable_content(request: EngineRequest) -> ModelContent | None:
    """What the model's files hold, of any format; None if they cannot be read, which the engine reports."""
    try:
        return content_of(request, any_format=True)
    except (BuildError, OSError):
        return None


def identity(request: EngineRequest, content: ModelContent, runtime: str) -> str:
    """Names what a model computes: of its content, its runtime, and every option that changes values.

    It is the same for all workers of a pool, on any device, and what is known of a split belongs to it.
    """
    facts = {
        "model": content.digest,
        "engine": runtime,
        "options": {k: v for k, v in request.options.session_config.items() if k != FOLDER_KEY},
        "provider": request.options.provider,
        "provider_options": dict(request.options.provider_options),
        **_graph_facts(request),
    }
    return entry_key(facts)


def engine_folder(request: EngineRequest, runtime: Runtime) -> str | None:
    """Where a runtime keeps what it builds as it runs (TensorRT, OpenVINO on GPUs); None if it cannot.

    A folder for each model's content: TensorRT finds an engine by the graph alone, OpenVINO by the model's
    path, and both would run an earlier model's weights.
    """
    try:
        facts = facts_of(request, runtime, content_of(request, any_format=True))
        return str(Cache.default().engine_folder(entry_key(facts)))
    except (BuildError, CacheUnusableError, MissingDependencyError, OSError) as exc:
        name = runtime.version.partition(" ")[0]
        _log.warning("%s: what %s builds is not kept: %s", request.model, name, exc)
        return None


def _adopt(folder: Path, request: EngineRequest, runtime: Runtime) -> Held:
    """A prepared model whose file the user gave as the model."""
    try:
        held = Cache(folder.parent, 0).open(folder.name)
    except (CacheUnusableError, InvalidInputError) as exc:  # the latter: its folder was renamed
        raise BuildError(f"{folder}: {exc}") from exc
    if held is None:
        raise BuildError(f"{folder} is no sound prepared model")
    try:
        for name, here in _environment(request, runtime).items():
            there = held.facts.get(name)
            if there != here:
                raise BuildError(f"{folder} was prepared for {name} {there}, here is {here}")
    except BaseException:
        held.close()
        raise
    return held


def _environment(request: EngineRequest, runtime: Runtime) -> dict[str, Any]:
    """The facts of a prepared model that are not the model's or the options'."""
    facts: dict[str, Any] = {
        "device": request.device.kind,
        "engine": runtime.version,
        "build": runtime.build,
        "cpu": cpu_features(),
    }
    # The keys of models for the CPU stay as they are; not all runtimes have providers.
    if request.device.kind != "cpu" and runtime.providers:
        provider = provider_of(request)
        facts |= {"provider": provider, "falls_back": NAMES[provider] not in runtime.providers}
    if request.device_model is not None:
        facts["card"] = request.device_model()
    return facts


def facts_of(request: EngineRequest, runtime: Runtime, content: ModelContent) -> dict[str, Any]:
    config = {k: v for k, v in request.options.session_config.items() if k not in runtime.ignored}
    return {
        **_environment(request, runtime),
        "model": content.digest,
        "options": config,
        "provider_options": graph_options(request),
        "variable_weights": sorted(request.options.variable_weights),
        **_graph_facts(request),
    }


def _graph_facts(request: EngineRequest) -> dict[str, Any]:
    """The options of a session that change its graph; those that are not given have no place."""
    options = request.options
    facts = {
        "session_options": {k: v for k, v in options.session_options.items() if k in _OF_GRAPHS},
        "custom_operators": [_library(path) for path in options.custom_operators],
        "free_dimensions": dict(options.free_dimensions),
        "free_denotations": dict(options.free_denotations),
        "precision": options.precision,
    }
    return {name: given for name, given in facts.items() if given}


_OF_GRAPHS = frozenset({"graph_optimization_level", "use_deterministic_compute"})
"""The `EngineOptions.session_options` on which an optimised graph depends."""


def _library(path: str) -> list[Any]:
    """What a library of operators is, by its place and its state; the loader may look for it elsewhere."""
    if os.sep not in path:
        return [path]
    info = check_regular(path)
    return [path, info.st_size, info.st_mtime_ns]


@cache
def cpu_features() -> str:
    """A digest of this CPU's abilities, on which packed weights depend."""
    text = platform.machine()
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86, ARM
                text += " ".join(sorted(value.split()))
                break
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Making an entry.


@dataclass(slots=True, kw_only=True)
class Making:
    """One entry that this process makes, or waits for: how its folder is filled, and what was reported of it.

    Attributes:
        function: What a child calls to fill it: with a function for its progress, `arguments`, the request as
            `request_of` reads it, the path of the folder, and the size that no file may exceed. It raises
            `BuildError` if it cannot.
        arguments: As JSON.
        request: Of the model.
        content: The model's.
        slow: The line of the log, with the model for its ``%s``, that says why a start takes long.
        progress: Called while the entry is made, here or elsewhere, with ``seconds`` so far, ``written``
            bytes, and ``bytes`` of the model.
        kind: What the entry is, for its list, after the model's name.
        keeps_failure: Whether an error of the function becomes an entry, which says it to all who come later.
    """

    function: Callable[..., None] | str
    arguments: Sequence[Any] = ()
    request: EngineRequest
    content: ModelContent
    slow: str
    progress: Progress | None
    kind: str = ""
    keeps_failure: bool = False
    _start: float = field(default_factory=monotonic, init=False)
    _seen: object = field(default=None, init=False)
    _warned: bool = field(default=False, init=False)

    def open(self, facts: Mapping[str, Any]) -> Held:
        """The entry of these facts; if there is none yet, one process of all that want it makes it.

        Raises:
            BuildError: The function raised it, and the failure is not kept.
            CacheUnusableError: See `Cache.make`.
            ChildFailedError: The process that makes it failed; another try may succeed.
        """
        return Cache.default().make(facts, self.fill, wait=_STUCK_SECONDS, progress=self.report)

    def report(self, written: int) -> None:
        if self.progress is not None:
            seconds = monotonic() - self._start
            self.progress({"seconds": seconds, "written": written, "bytes": self.content.size})

    def fill(self, folder: Path, lock: int) -> None:
        """Fill the folder in a child, which holds the lock as well, in case this process ends."""
        content, model = self.content, self.request.model
        start, self._warned = monotonic(), False
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < content.size:  # a prepared model has at least the model's size
            place = os.path.realpath(folder.parent)
            raise ChildFailedError(
                f"{free} bytes are free in {place}, expected at least {content.size}"
            )
        most_file_bytes = _MAX_GROWTH * content.size + _MAX_ADDED_BYTES
        error = ""
        try:
            run_child(
                self.function,
                [*self.arguments, _plain(self.request), str(folder), most_file_bytes],
                lambda state: self._tick(folder, state, monotonic() - start),
                pass_fds=(lock, *inherited(model)),
                most_seconds=_LEAST_SECONDS + content.size / _LEAST_BYTES_PER_SECOND,
            )
        except BuildError as exc:
            error = str(exc)
        seconds = monotonic() - start
        if not content.unchanged():
            raise ChildFailedError(f"{model} was changed meanwhile")
        if error and not self.keeps_failure:
            raise BuildError(error)
        if error:
            _record_failure(folder, error, content.size)
        name = f"{model_name(model)}{self.kind}"
        about: dict[str, Any] = {"name": name, "bytes": content.size, "seconds": seconds}
        about["sketch"] = content.sketch
        if not inherited(model):  # else it has no path
            about["files"] = content.stamps
        (folder / ABOUT_FILE).write_text(json.dumps(about), encoding="utf-8")
        self._tick(folder, {}, seconds)
        if not error:
            _log.info("prepared %s%s in %.1f s", self._model(), self.kind, seconds)

    def _model(self) -> str:
        name = in_words(self.request.model, self.request.model)
        return f"{name} ({self.content.size / 1e6:.0f} MB)"

    def _tick(self, folder: Path, state: Mapping[str, Any], seconds: float) -> None:
        """Report what is new of the child, by its folder or its processor time; warn once if it is slow."""
        written = disk_bytes(folder)
        if (written, state) != self._seen:
            self._seen = (written, state)
            self.report(written)
        if not self._warned and state and seconds >= _WARN_SECONDS:
            self._warned = True
            _log.warning(self.slow, self._model())


def is_transient(error: str) -> bool:
    """Whether the cause of a runtime's error may be gone at the next try."""
    return bool(_SHORT_OF_SOMETHING.search(error)) or device_error(error) is not None


def _record_failure(folder: Path, error: str, model_bytes: int) -> None:
    """Make it an entry that says why the model cannot be prepared, unless another try may succeed."""
    for entry in folder.iterdir():
        entry.unlink()
    if is_transient(error):
        raise ChildFailedError(error)
    _check_space(folder, 2 * model_bytes + LEAST_PREPARED_BYTES)
    (folder / FAILURE_FILE).write_text(error, encoding="utf-8")


def _check_space(folder: Path, size: int) -> None:
    """Allocate more space than preparing needs: a runtime without space has many messages.

    Not `statvfs`: the user's quota counts as well.
    """
    import tempfile  # not at every worker's start

    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            with naming_limit():
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as exc:
            raise ChildFailedError(
                f"there is no room in {os.path.realpath(folder.parent)}: {exc}"
            ) from exc


def _plain(request: EngineRequest) -> dict[str, Any]:
    """A request as JSON, without the memory that this process has for it.

    Nor with its share of a card's memory: the child needs all weights at once, and other workers wait for it.
    """
    options = replace(request.options, threads=request.threads, cores=None)
    return {"model": request.model, "device": str(request.device), "options": as_map(options)}


# In the child, and for processes that import no runtime.


def request_of(plain: Mapping[str, Any]) -> EngineRequest:
    return EngineRequest(
        model=plain["model"],
        device=Device.parse(plain["device"]),
        options=from_map(EngineOptions, plain["options"]),
    )


def limit_files(most_bytes: int) -> None:
    """Let this process write no file that is larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY or soft > most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))


def ensure_prepared(
    model: str | os.PathLike[str],
    options: EngineOptions = EngineOptions(),
    progress: Progress | None = None,
    device: str = "cpu:0",
    device_model: str = "",
) -> Held:
    """The prepared form of an ONNX model; a child process makes it if there is none yet.

    Args:
        model: Path of an ONNX model.
        options: Options of the engine that will load it.
        progress: Called while it is made.
        device: The CPU, or a CUDA device.
        device_model: Of the CUDA device, as in `EngineRequest`.

    Returns:
        The entry of the cache, for the caller to close.

    Raises:
        BuildError: The model cannot be prepared (the engine's message), or the cache cannot be used.
    """
    path = Path(model).absolute()
    request = _for_child(path, replace(options, prepare="always"), device)
    if device_model:
        request = replace(request, device_model=lambda: device_model)
    try:
        runtime = Runtime(**run_child(f"{_ADAPTER}:runtime", []))
        preparation = find_or_make(request, runtime, progress)
        if preparation.held is None:  # it may not be a model at all
            _in_child("check", request)
            raise BuildError(f"{path}: {'; '.join(preparation.notes)}")
    except (ChildFailedError, InvalidInputError) as exc:  # the latter: the limit of the cache
        raise BuildError(f"{path}: it could not be prepared: {exc}") from exc
    return preparation.held


def save_optimised(
    model: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: EngineOptions = EngineOptions(),
    device: str = "cpu:0",
) -> None:
    """Write the optimised form of an ONNX model to a file, as ONNX Runtime does; a child process does it.

    Args:
        model: Path of an ONNX model.
        target: ``SessionOptions.optimized_model_filepath``; further files as the options say.
        options: Options of the engine, by which the model is optimised.
        device: The device for which it is optimised.

    Raises:
        BuildError: The model cannot be loaded, or the file cannot be written.
    """
    path = Path(model).absolute()
    try:
        _in_child("save", _for_child(path, options, device), str(Path(target).absolute()))
    except ChildFailedError as exc:
        raise BuildError(f"{path}: its optimised form could not be saved: {exc}") from exc


def _for_child(model: Path, options: EngineOptions, device: str) -> EngineRequest:
    """The request of a process that runs nothing."""
    alone = replace(options, threads=1, inter_op_threads=None)
    return EngineRequest(model=str(model), device=Device.parse(device), options=alone)


def _in_child(name: str, request: EngineRequest, *arguments: object) -> None:
    """Call this function of the adapter in a child, with the request and further arguments."""
    task = [_plain(request), *arguments]
    run_child(f"{_ADAPTER}:{name}", task, pass_fds=inherited(request.model))
