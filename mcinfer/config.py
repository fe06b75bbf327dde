"""Options and devices: frozen, and checked when they are made."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from mcinfer.checks import (
    CORE_LISTS,
    FLAG,
    SECONDS,
    SIZE_MAP,
    TEXT_MAP,
    Options,
    choice,
    count,
    different,
    optional,
)
from mcinfer.errors import InvalidInputError, is_refusal

__tracebackhide__ = is_refusal

_DEVICE = re.compile(r"([a-z][a-z0-9_-]*):(\d{1,4})")

DEFAULT_DEVICE_KIND = "cpu"
"""The kind of device that a plain number of devices means."""

INLINE = "inline"
"""The device of a session in the user's own process, which has the whole CPU there."""

CARD_KIND = "cuda"
"""The kind of devices that are NVIDIA cards; their indices are those of the CUDA driver."""

DLPACK_KINDS = {2: "cuda", 13: "cuda"}
"""By the number of a kind of devices in DLPack (kDLCUDA, kDLCUDAManaged of dlpack.h), its name here."""

MAX_RANKS = 64
"""Most ranks of one group."""

MAX_CONCURRENT_RUNS = 16
"""Most runs that one worker executes at once."""

ProviderKind = Literal["cpu", "cuda", "tensorrt", "cann"]
PROVIDERS: tuple[ProviderKind, ...] = get_args(ProviderKind)
"""Execution providers of ONNX Runtime, by the names that it has for them in short."""

PrecisionKind = Literal["f32", "bf16", "f16"]

PrepareKind = Literal["auto", "background", "wait", "always", "never"]


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine: a kind and an index, written ``kind:index``; or `INLINE`, as it is."""

    kind: str
    index: int

    @classmethod
    def parse(cls, text: object) -> "Device":
        """Read ``"cpu:0"``, ``"cuda:1"`` or `INLINE`; raise `InvalidInputError` for another form."""
        if isinstance(text, str) and text == INLINE:
            return cls(INLINE, 0)
        match = _DEVICE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise InvalidInputError(
                f"devices: got {text!r}, expected a device such as 'cpu:0' or 'cuda:1'"
            )
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return INLINE if self.kind == INLINE else f"{self.kind}:{self.index}"


def automatic_workers(cores: int) -> int:
    """Two CPU workers up to 16 cores, then one per 8: the rule of MindSpore Lite's parallel runner."""
    threads = max(1, cores // 2) if cores <= 16 else 8
    return max(1, cores // threads)


def parse_devices(
    devices: int | str | Sequence[int | str] | None, cores: int
) -> tuple[Device, ...]:
    """The devices of a pool.

    Args:
        devices: A number of CPU devices; one name; a sequence of names or of indices of CPU devices;
            ``"cpu"`` or ``None`` for the whole CPU in as many shares as `automatic_workers` says; `INLINE`,
            which has no other beside it.
        cores: Number of cores that this process may use (`mcinfer.machine.whole_cpus`).
    """
    if devices is None or devices == DEFAULT_DEVICE_KIND:
        devices = automatic_workers(cores)
    if isinstance(devices, str):
        return (Device.parse(devices),)
    if isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= 1024:
            raise InvalidInputError(f"devices: got {devices}, expected a number from 1 to 1024")
        return tuple(Device(DEFAULT_DEVICE_KIND, i) for i in range(devices))
    if isinstance(devices, bytes) or not isinstance(devices, Sequence):
        raise InvalidInputError(
            f"devices: got {devices!r}, expected a number or a sequence such as ['cpu:0', 'cpu:1']"
        )
    if not devices:
        raise InvalidInputError("devices: got an empty sequence, expected at least one device")
    parsed = tuple(
        Device(DEFAULT_DEVICE_KIND, one) if type(one) is int and one >= 0 else Device.parse(one)
        for one in devices
    )
    if len(parsed) > 1 and any(device.kind == INLINE for device in parsed):
        raise InvalidInputError(f"devices: got {[*devices]}, expected {INLINE!r} alone")
    return parsed


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """The cores that one worker is pinned to; none for a worker that is not pinned.

    Attributes:
        shared: Whether another worker of the pool is pinned to one of these cores too.
        threads: Threads of one run, if a CPU quota allows fewer than there are cores; None is one per core.
        wide_cores: Those of all workers on the CPU, if more threads can run there; empty if not.
    """

    cores: tuple[int, ...] = ()
    shared: bool = False
    threads: int | None = None
    wide_cores: tuple[int, ...] = ()

    def of_allowed(self, allowed: Collection[int]) -> "CoreShare":
        """The share that a worker has if these cores are allowed: those of its cores that are.

        Without any, the worker is not pinned.
        """
        if {*self.cores, *self.wide_cores} <= {*allowed}:
            return self
        cores, wide = (
            tuple(core for core in planned if core in allowed)
            for planned in (self.cores, self.wide_cores)
        )
        threads = self.threads if cores else self.threads or len(self.cores)
        return CoreShare(
            cores=cores,
            shared=self.shared or not cores,
            threads=None if threads is None else min(threads, len(cores or allowed)),
            wide_cores=wide if len(wide) > len(cores) > 0 else (),
        )


NOT_PINNED = CoreShare()


def share_cores(
    devices: Sequence[Device],
    cores: Sequence[int],
    chosen: Sequence[Sequence[int]] | None = None,
    cpus: int | None = None,
) -> dict[int, CoreShare]:
    """Distribute the usable cores over the workers of a pool.

    ``cpu:i`` is the i-th of n equal shares. n is the number of different CPU devices in the pool, or more
    if an index needs it. A device does not exist if its index is at least the number of CPU devices listed
    and at least the number of cores. `chosen` gives each worker its cores in place of a share.

    A CPU quota (`cpus`, from `mcinfer.machine.whole_cpus`) is distributed as threads, as evenly as the
    cores. All cores are distributed whatever the quota is: a quota limits time, not place. If all containers
    of a host used only its first few cores, these would be overloaded while the others idle.

    Returns:
        By worker index, for CPU workers, or for all workers if cores were chosen.

    Raises:
        InvalidInputError: A device, or a chosen core, does not exist.
    """
    shares: dict[int, CoreShare] = {}
    # By worker, its cores, its parts of the quota, and how many parts the quota has.
    mine: dict[int, tuple[tuple[int, ...], range, int]] = {}
    if chosen is None:
        indices = {i: device.index for i, device in enumerate(devices) if device.kind == "cpu"}
        limit = max(len(cores), len({*indices.values()}))
        last = max(indices.values(), default=0)
        if last >= limit:
            raise InvalidInputError(
                f"device cpu:{last} does not exist: {len(cores)} cores are usable here, "
                f"so the last device is cpu:{limit - 1}"
            )
        for worker, index in indices.items():
            mine[worker] = _part(cores, index, last + 1), range(index, index + 1), last + 1
    else:
        everything = [core for item in chosen for core in item]
        if len(chosen) != len(devices):
            raise InvalidInputError(
                f"cores: got {len(chosen)} lists, expected one for each of {len(devices)} workers"
            )
        if absent := [core for core in everything if core not in cores]:
            raise InvalidInputError(f"cores: got {absent}, expected some of {[*cores]}")
        first = 0
        for worker, item in enumerate(chosen):
            # Each chosen core is one part, even if other workers have it too.
            mine[worker] = tuple(item), range(first, first + len(item)), len({*everything})
            first += len(item)
    pinned = Counter(core for own, _, _ in mine.values() for core in own)
    together = tuple(core for core in cores if core in pinned) if chosen is None else ()
    for worker, (own, parts, whole) in mine.items():
        threads = None
        if cpus is not None and cpus < len(cores):
            start, stop = (part * cpus // whole for part in (parts.start, parts.stop))
            threads = min(len(own), max(1, stop - start))
        shared = any(pinned[core] > 1 for core in own)
        most = len(together) if cpus is None else min(cpus, len(together))
        shares[worker] = CoreShare(
            cores=own,
            shared=shared,
            threads=threads,
            wide_cores=together if most > (threads or len(own)) else (),
        )
    return shares


def _part(cores: Sequence[int], part: int, parts: int) -> tuple[int, ...]:
    """One of equal parts; parts share a core where there are too few."""
    start, stop = (i * len(cores) // parts for i in (part, part + 1))
    return tuple(cores[start : max(stop, start + 1)])


TOO_MANY_PER_CORE = 8
"""So many CPU workers for each core that they may use are a mistake."""


def check_cores(devices: Sequence[Device], shares: Mapping[int, CoreShare], cpus: int) -> str:
    """Compare the CPU workers of a pool with the cores that they may use.

    Args:
        devices: Those of the pool.
        shares: The cores of each worker, of `share_cores`.
        cpus: Number of cores that this process may use (`mcinfer.machine.whole_cpus`).

    Returns:
        A warning that some workers share a core; empty if none do.

    Raises:
        InvalidInputError: So many share one that the number must be a mistake.
    """
    own = [share.cores for i, share in shares.items() if devices[i].kind == "cpu"]
    count = min(cpus, len({core for cores in own for core in cores}))
    if len(own) >= max(1, count) * TOO_MANY_PER_CORE:
        raise InvalidInputError(
            f"devices: got {len(own)} workers for {count} usable CPU cores, expected at most {count}, "
            f"one for each core (fewer than {TOO_MANY_PER_CORE} for each are possible)"
        )
    if len(own) <= count:
        return ""
    return (
        f"devices: {len(own)} workers share {count} usable CPU cores, and slow each other down; "
        f"expected at most {count}"
    )


_Positive = Annotated[int | None, optional(count(1))]
_Time = Annotated[float, SECONDS]
_Flag = Annotated[bool, FLAG]
_TextMap = Annotated[Mapping[str, str], TEXT_MAP]
_SizeMap = Annotated[Mapping[str, int], SIZE_MAP]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Options):
    """Options of the engine for loading and running a model.

    Attributes:
        threads: Threads of one run; ``None`` is as many as the worker has cores, or fewer if its part of a
            CPU quota does not allow more, or if `concurrent_runs` or `streams` share them.
        inter_op_threads: Threads that run operators of one run in parallel; ``None`` runs one operator
            after another.
        concurrent_runs: How many runs a worker executes at once, each in a thread of its own, on one loaded
            model; 1 to 16. For short runs with small activations: n callers share one process, which takes
            less memory than n workers, and a crash ends the runs of all. Only for ONNX Runtime on the CPU.
        streams: The same for OpenVINO, by its own word, on CPUs and graphics processors: its streams have
            threads of their own, and one copy of the weights. ``None`` is one.
        cores: By worker index, the operating-system cores to pin it to, in place of its share: of all cores
            for a CPU worker; a worker on a card has none, and those of the card's NUMA node may suit it.
        prepare: Whether to prepare a model once in a cache folder, so that all workers map one copy of its
            weights, and whether to wait for that. Small models (docs/weights.md says which) are loaded as
            they are. Others: ``"background"`` loads one that is not prepared yet as it is, and has a process
            of low priority prepare it for workers that start later; ``"wait"`` prepares it first; ``"auto"``
            waits if the pool's copies beside the first would take much memory. Of any size: ``"always"``
            waits, ``"never"`` does without. What cannot be prepared is loaded as it is. Only for ONNX
            Runtime, on the CPU and on CUDA devices (which wait; ``"auto"``: those with several workers,
            which share the weights); for TensorRT and OpenVINO, whether to keep what they build, for quicker
            starts.
        variable_weights: Names of weights (ONNX: initialisers) that `Master.update_weights` may replace.
            The engine cannot prepack them as it does constant ones, so runs may be slower.
        allow_fallback: Whether a worker may use another provider than its device's (ONNX Runtime falls back
            to the CPU by itself). Without it, this is a `BuildError`.
        session_config: Configuration entries for the runtime, passed unchanged, text to text (ONNX Runtime:
            ``SessionOptions.add_session_config_entry``; OpenVINO: properties of ``Core.compile_model``).
        provider_options: Options of the execution provider, text to text. ``gpu_mem_limit`` is the part of a
            card's memory for all its workers together. None may be an address, such as
            ``user_compute_stream``.
        session_options: Further attributes of ONNX Runtime's ``SessionOptions``, by its own names, text to
            text: ``graph_optimization_level`` (``"ORT_ENABLE_BASIC"``), ``execution_order``,
            ``enable_cpu_mem_arena``, ``enable_mem_pattern``, ``enable_mem_reuse``,
            ``use_deterministic_compute`` (``"0"`` or ``"1"``), ``log_severity_level``,
            ``log_verbosity_level``, ``logid``; and ``default_logger_severity`` and
            ``default_logger_verbosity`` for all that a worker's process logs.
        custom_operators: Paths of libraries with operators of your own, which each worker loads
            (``SessionOptions.register_custom_ops_library``).
        free_dimensions: Sizes of symbolic dimensions of the inputs, by name.
        free_denotations: Sizes of dimensions of the inputs, by their denotation.
        describe: Whether a worker reports what ONNX Runtime says of the model (`Master.description`).
        provider: The execution provider of ONNX Runtime: ``"cpu"``, ``"cuda"``, ``"tensorrt"``, ``"cann"``;
            ``None`` is the device's own. ``"tensorrt"`` is for devices such as ``"cuda:0"``.
        precision: The floating-point type in which OpenVINO computes, as far as the device has it:
            ``"f32"``, ``"bf16"``, ``"f16"``; ``None`` is ``"f32"``, on ``npu:0`` the device's own. Inputs and
            outputs keep their types.
    """

    threads: _Positive = None
    inter_op_threads: _Positive = None
    concurrent_runs: Annotated[int, count(1, MAX_CONCURRENT_RUNS)] = 1
    streams: Annotated[int | None, optional(count(1, MAX_CONCURRENT_RUNS))] = None
    cores: Annotated[Sequence[Sequence[int]] | None, optional(CORE_LISTS)] = None
    prepare: Annotated[PrepareKind, choice(*get_args(PrepareKind))] = "auto"
    variable_weights: Annotated[Sequence[str], different("names")] = ()
    allow_fallback: _Flag = False
    session_config: _TextMap = field(default_factory=dict)
    provider_options: _TextMap = field(default_factory=dict)
    provider: Annotated[
        ProviderKind | None, optional(choice(*PROVIDERS), f"one of {[None, *PROVIDERS]}")
    ] = None
    session_options: _TextMap = field(default_factory=dict)
    custom_operators: Annotated[Sequence[str], different("paths")] = ()
    free_dimensions: _SizeMap = field(default_factory=dict)
    free_denotations: _SizeMap = field(default_factory=dict)
    describe: _Flag = False
    precision: Annotated[
        PrecisionKind | None,
        optional(choice(*get_args(PrecisionKind)), f"one of {[None, *get_args(PrecisionKind)]}"),
    ] = None

    @property
    def runs_at_once(self) -> int:
        """How many runs a worker executes at once."""
        return self.streams or self.concurrent_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel(Options):
    """How one model is cut over several devices: on each runs a rank, a process with a slice of the model.

    Rank ``stage * tensor + i`` of a group is the i-th slice of that stage.

    Attributes:
        tensor: Over how many ranks the weights of each layer are cut (tensor parallelism).
        pipeline: Over how many stages the layers are distributed, one after another (pipeline parallelism).
        replicas: How many groups of such ranks run side by side, each with the whole model.
    """

    tensor: Annotated[int, count(1)] = 1
    pipeline: Annotated[int, count(1)] = 1
    replicas: Annotated[int, count(1)] = 1

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.ranks > MAX_RANKS:
            raise InvalidInputError(
                f"tensor, pipeline: got {self.tensor} and {self.pipeline}, expected a group of at most "
                f"{MAX_RANKS} ranks"
            )

    @property
    def ranks(self) -> int:
        """How many ranks one group has."""
        return self.tensor * self.pipeline

    @property
    def devices(self) -> int:
        """How many devices that takes."""
        return self.ranks * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts(Options):
    """Time limits in seconds. `math.inf` waits for ever; no default does.

    Attributes:
        start: For a worker to start, import its runtime and load the model. While the model is being
            prepared, each sign of progress starts this time again.
        predict: For the answer to a request, from the call on, unless the call gives its own time-out.
        cancel_grace: For a worker to stop a run whose request timed out. After that the worker is killed and
            started again.
        close: For workers to end by themselves in `Master.close`. After that they are killed.
    """

    start: _Time = 300.0
    predict: _Time = 600.0
    cancel_grace: _Time = 1.0
    close: _Time = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy(Options):
    """When a worker that died is started again. Restarts never stop; the policy says how soon they come.

    A worker that has answered a request since it was ready is started again at once, without limit: what
    ended it came from outside, or from one request. The policy is for those that die before.

    Attributes:
        budget: How many restarts one worker gets within `window`, the first at once, the others after
            `backoff`. A worker past its budget is started `backoff_limit` seconds after each death. It gets
            a new budget once it has been ready for `backoff_limit` seconds, or dies after an answer. While
            all workers are past their budget, requests fail at once.
        window: Seconds.
        backoff: Seconds before the second restart within the window, doubled for each further one. The
            first restart is at once.
        backoff_limit: Seconds; the longest wait before a restart, and the wait past the budget (at least
            0.1 s).
        max_requests: After this many requests, or pieces of requests, a worker is replaced by a new one as
            in `Master.restart_workers`, against leaks in a runtime; ``None`` is never.
        max_memory_bytes: Replace a worker in the same way when its own memory (resident and not shared, by
            statm of proc(5)), or that of one of its ranks, exceeds this many bytes. mcinfer checks this once
            a second.
    """

    budget: Annotated[int, count(0)] = 5
    window: _Time = 60.0
    backoff: _Time = 0.1
    backoff_limit: _Time = 5.0
    max_requests: _Positive = None
    max_memory_bytes: _Positive = None

    def delay(self, earlier: int) -> float:
        """Seconds to wait before a restart, after `earlier` others within the window."""
        if earlier == 0:
            return 0.0
        return float(min(self.backoff_limit, self.backoff * 2 ** min(earlier - 1, 60)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Options):
    """Limits on the requests and the memory of a master.

    Attributes:
        queue: Most requests accepted and not yet answered, including those in a run.
        queue_bytes: Most bytes of their tensors (inputs, and outputs of known shapes); ``None`` is no limit
            except `memory_bytes`. A single request above the limit is accepted if there is no other.
        when_queue_full: What a call does at one of these two limits: ``"raise"`` `QueueFullError`, or
            ``"wait"`` for its turn until the call's time-out passes.
        memory_bytes: Bytes of shared memory for tensors, and likewise on each card that tensors lie on;
            ``None`` is half the memory of this machine, or of this process's control group, and half of what
            is free on a card when the first tensor comes.
        when_full: What a call does when all of that memory is in use: ``"wait"`` until some is free or the
            call's time-out passes, or ``"raise"`` `QueueFullError`.
        worker_memory_bytes: Most bytes of its own memory that a worker may allocate (``RLIMIT_DATA`` of
            getrlimit(2)). An allocation above the limit fails, and with it the build or the run, before the
            machine runs out of memory. ``None`` is all memory of the machine or the control group for a CPU
            worker. For other devices, whose drivers reserve more, ``None`` is no limit.
    """

    queue: Annotated[int, count(1)] = 10_000
    queue_bytes: _Positive = None
    when_queue_full: Annotated[Literal["raise", "wait"], choice("wait", "raise")] = "raise"
    memory_bytes: Annotated[int | None, optional(count(4096))] = None
    when_full: Annotated[Literal["wait", "raise"], choice("wait", "raise")] = "wait"
    worker_memory_bytes: Annotated[int | None, optional(count(1 << 20))] = None


# The plan of a pool.


_PIECES_OF_A_STAGE = 4
"""Into how many pieces per stage a batch is cut for a pipeline: p stages work for m of m + p - 1 steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process of a pool.

    Attributes:
        device: What it runs on.
        share: Its cores.
        rank: Its rank in its group; 0 if the model is not cut.
        card_workers: How many workers of the pool its card has; 1 on other devices.
        shares_weights: Whether it may hold the weights on its card once with the card's other workers.
    """

    device: Device
    share: CoreShare
    rank: int = 0
    card_workers: int = 1
    shares_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What the options of a pool come to.

    Attributes:
        groups: By worker, its processes: one, or the ranks of a model that is cut.
        parallel: How the model is cut.
        pieces: Into how many pieces a batch is cut for each run that the workers execute at once.
        warning: What the user should know of the choice of cores; empty if nothing.
        threads: How many runs a session in this process executes at once; 0 with workers.
    """

    groups: tuple[tuple[ProcessPlan, ...], ...]
    parallel: Parallel
    pieces: int
    warning: str
    threads: int = 0

    @property
    def processes(self) -> tuple[ProcessPlan, ...]:
        return tuple(process for group in self.groups for process in group)

    @property
    def inline(self) -> bool:
        """Whether the session runs in the user's own process."""
        return self.processes[0].device.kind == INLINE


def plan_pool(
    devices: int | str | Sequence[int | str] | None,
    *,
    engine: str,
    options: EngineOptions,
    restart: RestartPolicy,
    limits: Limits,
    parallel: Parallel | None,
    inline_threads: int | None = None,
    cores: Sequence[int],
    cpus: int,
) -> PoolPlan:
    """The processes of a pool with these options; the first seven arguments are those of `mcinfer.Master`.

    `cores` are those that this process may use, and `cpus` is how many threads can run there
    (`mcinfer.machine.whole_cpus`).

    Raises:
        InvalidInputError: The options do not fit the devices, or each other.
    """
    cut = Parallel() if parallel is None else parallel
    if parallel is not None and devices is None:
        devices = cut.devices
    chosen = parse_devices(devices, cpus)
    threads = 0
    if chosen[0].kind == INLINE:
        _check_inline(options, restart, limits, parallel)
        # Other engines take one run at a time, unless they have streams.
        threads = (
            cpus if engine == "onnxruntime" and options.runs_at_once == 1 else options.runs_at_once
        )
    if inline_threads is not None:
        count(1, 1024).kept("inline_threads", inline_threads)
        if not threads:
            raise InvalidInputError(
                f"inline_threads: got {inline_threads}, expected None without devices={INLINE!r}"
            )
        threads = inline_threads
    if parallel is not None and len(chosen) != cut.devices:
        raise InvalidInputError(
            f"devices: got {len(chosen)}, expected {cut.devices}, one for each rank of {cut}"
        )
    if cut.ranks > 1:
        _check_cut(cut, engine, options)
    shares = share_cores(chosen, cores, options.cores, cpus)
    nowhere = CoreShare(threads=1 if threads > 1 else cpus if cpus < len(cores) else None)
    may_be_wide = (
        not options.threads
        and options.runs_at_once == 1
        and restart.max_memory_bytes is None
        and cut.ranks == 1
    )
    may_share = (
        engine == "onnxruntime"
        and options.prepare != "never"
        and options.provider in (None, "cuda")
        and cut.ranks == 1
    )
    on_cards = Counter(device.index for device in chosen if device.kind == CARD_KIND)
    processes = []
    for index, device in enumerate(chosen):
        share = shares.get(index, nowhere)
        process = ProcessPlan(
            device=device,
            share=share if may_be_wide else replace(share, wide_cores=()),
            rank=index % cut.ranks,
            card_workers=on_cards[device.index] if device.kind == CARD_KIND else 1,
            shares_weights=may_share and device.kind == CARD_KIND and chosen.count(device) > 1,
        )
        processes.append(process)
    return PoolPlan(
        groups=tuple(
            tuple(processes[i : i + cut.ranks]) for i in range(0, len(processes), cut.ranks)
        ),
        parallel=cut,
        # A pipeline is idle in part while its first and its last pieces pass, so it gets many.
        pieces=1 if cut.pipeline == 1 else _PIECES_OF_A_STAGE * cut.pipeline,
        warning=check_cores(chosen, shares, cpus),
        threads=threads,
    )


def _check_cut(cut: Parallel, engine: str, options: EngineOptions) -> None:
    """Raise `InvalidInputError` for what a model that is cut cannot have."""
    if engine != "onnxruntime":
        raise InvalidInputError(f"parallel: got {cut} with engine {engine!r}, expected onnxruntime")
    if options.variable_weights:
        raise InvalidInputError(
            f"variable_weights: got {[*options.variable_weights]}, but the weights of a model that is cut "
            f"over devices ({cut}) cannot be replaced"
        )
    if options.runs_at_once > 1:
        name = "streams" if options.streams else "concurrent_runs"
        raise InvalidInputError(
            f"{name}: got {options.runs_at_once} with parallel={cut}, expected 1: the ranks of a group "
            "execute one run together"
        )


def _check_inline(
    options: EngineOptions, restart: RestartPolicy, limits: Limits, parallel: Parallel | None
) -> None:
    """Raise `InvalidInputError` for what a session in this process cannot have."""
    for name, value, why in (
        ("cores", options.cores, "threads of this process are not pinned"),
        ("parallel", parallel, "one session has the whole model"),
        ("worker_memory_bytes", limits.worker_memory_bytes, "that is a limit of a process"),
        ("max_memory_bytes", restart.max_memory_bytes, "that is the memory of a process"),
        ("max_requests", restart.max_requests, "there is no process to replace"),
        ("memory_bytes", limits.memory_bytes, "tensors lie in ordinary memory"),
    ):
        if value is not None:
            raise InvalidInputError(
                f"{name}: got {value!r} with devices={INLINE!r}, expected None: {why}"
            )
