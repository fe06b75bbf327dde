"""Tests of mcinfer/config.py."""

import copy
import dataclasses
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcinfer.checks import as_map, from_map
from mcinfer.config import (
    CoreShare,
    Device,
    EngineOptions,
    Limits,
    Parallel,
    PoolPlan,
    RestartPolicy,
    Timeouts,
    automatic_workers,
    check_cores,
    parse_devices,
    plan_pool,
    share_cores,
)
from mcinfer.errors import InvalidInputError

OPTIONS: list[Callable[..., Any]] = [EngineOptions, Timeouts, RestartPolicy, Limits]

NOT_SECONDS = (-0.001, math.nan, "1", True)
NOT_COUNTS = (-1, 1.5, True)
NOT_CORES: tuple[Any, ...] = (
    *((), [], 3, "01", {0: 1}, {0}, [0, 1], ["0"], [{0}], [None]),
    *([[]], [[0], []], [[-1]], [[0.0]], [[True]], [[None]], [["0"]], [[0, 0]], [b"\x00"]),
)
NOT_NAMES: tuple[Any, ...] = (
    *("w", b"w", None, {"w": 1}, {"w"}),
    *(["w", "w"], ["w", 1], [["w"]], [None]),
)

SECONDS: dict[Callable[..., Any], tuple[str, ...]] = {
    Timeouts: ("start", "predict", "cancel_grace", "close"),
    RestartPolicy: ("window", "backoff", "backoff_limit"),
}
BAD: list[tuple[Callable[..., Any], tuple[str, ...], tuple[Any, ...]]] = [
    *((options, names, NOT_SECONDS) for options, names in SECONDS.items()),
    (EngineOptions, ("threads", "inter_op_threads"), (0, *NOT_COUNTS)),
    (EngineOptions, ("concurrent_runs",), (0, 17, None, *NOT_COUNTS)),
    (EngineOptions, ("streams",), (0, 17, *NOT_COUNTS)),
    (EngineOptions, ("cores",), NOT_CORES),
    (EngineOptions, ("prepare",), ("", "Auto", True, None)),
    (EngineOptions, ("provider",), ("", "CUDA", "CUDAExecutionProvider", True)),
    (EngineOptions, ("precision",), ("", "fp16", "F32", "float32", True)),
    (EngineOptions, ("variable_weights", "custom_operators"), NOT_NAMES),
    (EngineOptions, ("allow_fallback", "describe"), ("no", 1, None)),
    (
        EngineOptions,
        ("free_dimensions", "free_denotations"),
        ({"n": -1}, {"n": "2"}, {"n": True}, {1: 2}, None, "text", [("n", 2)]),
    ),
    (
        EngineOptions,
        ("session_config", "provider_options", "session_options"),
        ({"a": 1}, {1: "a"}, {b"a": "b"}, None, "text", [("a", "b")]),
    ),
    (RestartPolicy, ("budget",), (None, *NOT_COUNTS)),
    (RestartPolicy, ("max_requests", "max_memory_bytes"), (0, *NOT_COUNTS)),
    (Limits, ("queue",), (0, None, *NOT_COUNTS)),
    (Limits, ("memory_bytes",), (0, 4095, *NOT_COUNTS)),
    (Limits, ("queue_bytes",), (0, *NOT_COUNTS)),
    (Limits, ("worker_memory_bytes",), (0, (1 << 20) - 1, *NOT_COUNTS)),
    (Limits, ("when_full", "when_queue_full"), ("block", None, True, "", ["wait"])),
]
BAD_VALUES = [
    (options, name, value) for options, names, values in BAD for name in names for value in values
]


# Devices.


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 2), (3, 3), (8, 2), (16, 2), (17, 2), (64, 8)]
)
def test_automatic_workers_follow_the_rule_of_mindspore_lite(cores: int, workers: int) -> None:
    assert automatic_workers(cores) == workers


NO_DEVICES: tuple[Any, ...] = (
    *(0, 1025, True, 1.0, [], [-1], [True], [None], "cuda"),
    *(["cpu:0", "x"], ["inline", "cpu:0"], ["inline", "inline"]),
    *([text] for text in ("", "cpu", "cpu:-1", "CPU:0", "cpu:0\n", "cpu:12345")),
)


def test_devices_of_openvino_have_names_of_their_own() -> None:
    parsed = parse_devices(["openvino-gpu:1", "npu:0", "cpu:0"], cores=4)
    assert [str(device) for device in parsed] == ["openvino-gpu:1", "npu:0", "cpu:0"]
    assert [*share_cores(parsed, range(4))] == [2]  # the others are not pinned


@pytest.mark.parametrize("devices", NO_DEVICES)
def test_devices_that_make_no_sense_are_refused(devices: Any) -> None:
    with pytest.raises(InvalidInputError, match="devices: got"):
        parse_devices(devices, cores=4)


# Pools.


def plan(devices: Any = None, cores: int = 4, cpus: int | None = None, **given: Any) -> PoolPlan:
    """The plan of a pool on a machine whose card 0 is beside the last two cores."""
    options: dict[str, Any] = {
        "engine": "onnxruntime",
        "options": EngineOptions(),
        "restart": RestartPolicy(),
        "limits": Limits(),
        "parallel": None,
    }
    return plan_pool(
        devices,
        **(options | given),
        cores=range(cores),
        cpus=cpus or cores,
    )


def test_a_pool_on_the_cpu_has_a_share_of_the_cores_for_each_worker() -> None:
    pool = plan(2)
    assert [[str(one.device) for one in group] for group in pool.groups] == [["cpu:0"], ["cpu:1"]]
    assert [one.share.cores for one in pool.processes] == [(0, 1), (2, 3)]
    assert [one.share.wide_cores for one in pool.processes] == [
        (0, 1, 2, 3)
    ] * 2  # a lone request is wide
    assert (pool.pieces, pool.warning, pool.inline) == (1, "", False)
    assert plan(5).warning.startswith("devices: 5 workers share 4")
    with pytest.raises(InvalidInputError, match="device cpu:9 does not exist"):
        plan("cpu:9")
    for some in (
        {"options": EngineOptions(threads=1)},
        {"options": EngineOptions(concurrent_runs=2)},
        {"restart": RestartPolicy(max_memory_bytes=1 << 30)},
        {"parallel": Parallel(tensor=2)},
    ):
        assert not any(one.share.wide_cores for one in plan(2, **some).processes), some


def test_a_model_that_is_cut_has_groups_of_ranks() -> None:
    pool = plan(parallel=Parallel(tensor=2, pipeline=2, replicas=2), cores=8)
    assert [[one.rank for one in group] for group in pool.groups] == [[0, 1, 2, 3]] * 2
    assert pool.pieces == 8  # four for each stage
    default: dict[str, Any] = {"devices": 2, "parallel": Parallel(tensor=2)}
    for some in (
        {"engine": "openvino"},
        {"options": EngineOptions(variable_weights=["w"])},
        {"options": EngineOptions(concurrent_runs=2)},
        {"devices": 3},
        {"devices": "inline"},
    ):
        with pytest.raises(InvalidInputError, match=": got "):
            plan(**default | some)


def test_workers_of_one_card_share_its_weights_and_are_not_pinned() -> None:
    pool = plan(["cuda:0", "cuda:0", "cuda:1", "cpu:0"])
    assert [one.shares_weights for one in pool.processes] == [True, True, False, False]
    assert [one.card_workers for one in pool.processes] == [2, 2, 1, 1]
    assert [one.share.cores for one in pool.processes] == [(), (), (), (0, 1, 2, 3)]
    for some in ({"engine": "fake"}, {"options": EngineOptions(prepare="never")}):
        assert not any(one.shares_weights for one in plan(["cuda:0", "cuda:0"], **some).processes)


def test_under_a_quota_a_worker_without_cores_has_the_quota_as_threads() -> None:
    assert plan("npu:0", cpus=3).processes[0].share == CoreShare(threads=3)
    assert plan("npu:0").processes[0].share == CoreShare()


def test_a_session_inline_takes_no_option_of_a_process() -> None:
    assert plan("inline").inline
    for name, some in (
        ("cores", {"options": EngineOptions(cores=[[0]])}),
        ("parallel", {"parallel": Parallel()}),
        ("worker_memory_bytes", {"limits": Limits(worker_memory_bytes=1 << 20)}),
        ("max_memory_bytes", {"restart": RestartPolicy(max_memory_bytes=1)}),
    ):
        with pytest.raises(InvalidInputError, match=f"^{name}: got .* with devices='inline'"):
            plan("inline", **some)


# Cores.


@given(st.data(), st.lists(st.integers(0, 1023), min_size=1, max_size=80, unique=True).map(sorted))
def test_cores_are_dealt_out_evenly_and_completely(data: st.DataObject, cores: list[int]) -> None:
    count = data.draw(st.integers(1, len(cores)))
    shares = share_cores(parse_devices(count, len(cores)), cores)
    assert [*shares] == [*range(count)]
    dealt: list[int] = []
    sizes = set()
    for share in shares.values():
        assert not share.shared
        dealt += share.cores
        sizes.add(len(share.cores))
    assert dealt == cores
    assert max(sizes) - min(sizes) <= 1


@given(cores=st.integers(1, 16), more=st.integers(1, 20))
def test_more_workers_than_cores_share_and_are_told_so(cores: int, more: int) -> None:
    shares = share_cores(parse_devices(cores + more, cores), range(cores))
    assert len(shares) == cores + more
    taken = Counter(share.cores for share in shares.values())
    assert {*taken} == {(core,) for core in range(cores)}
    assert max(taken.values()) - min(taken.values()) <= 1
    for share in shares.values():
        assert share.shared is (taken[share.cores] > 1)


def test_cores_that_are_allowed_stay_and_without_any_a_worker_is_not_pinned() -> None:
    devices = parse_devices(2, 4)
    first, second = share_cores(devices, range(4), [[0, 1], [2, 3]], cpus=2).values()
    assert first.of_allowed([0, 1, 2]) is first
    assert second.of_allowed([0, 1, 2]) == CoreShare(cores=(2,), threads=1)
    assert second.of_allowed([0, 1]) == CoreShare(shared=True, threads=1)
    wide = CoreShare(cores=(2, 3), wide_cores=(0, 1, 2, 3))
    assert wide.of_allowed(range(2)) == CoreShare(shared=True, threads=2)
    assert wide.of_allowed([1, 2, 3]) == CoreShare(cores=(2, 3), wide_cores=(1, 2, 3))
    assert wide.of_allowed([2, 3]) == CoreShare(cores=(2, 3))


@given(cores=st.integers(1, 64), workers=st.integers(1, 1024), quota=st.integers(1, 64))
def test_more_workers_than_cores_are_warned_of_and_many_more_are_refused(
    cores: int, workers: int, quota: int
) -> None:
    devices = parse_devices(workers, cores)
    shares = share_cores(devices, range(cores), cpus=quota)
    few = min(cores, quota, workers)
    if workers >= 8 * few:
        with pytest.raises(InvalidInputError, match=f"^devices: got {workers} workers for {few} "):
            check_cores(devices, shares, quota)
    else:
        warning = check_cores(devices, shares, quota)
        assert warning.startswith(f"devices: {workers} workers share {few} ") == (workers > few)


def test_workers_are_counted_against_the_cores_that_were_chosen_and_cards_have_none() -> None:
    devices = parse_devices(["cpu:0", "cpu:1", "cuda:0"], 4)
    assert check_cores(devices, share_cores(devices, range(4)), 4) == ""
    assert check_cores(devices[2:], share_cores(devices[2:], range(4)), 4) == ""
    chosen = share_cores(devices, range(4), [[3], [3], [3]])
    assert check_cores(devices, chosen, 4).startswith("devices: 2 workers share 1 usable CPU cores")


def test_device_that_does_not_exist_is_refused() -> None:
    devices = [Device("cpu", 0), Device("cpu", 4), Device("cuda", 0)]
    with pytest.raises(InvalidInputError, match=r"cpu:4 does not exist.* the last device is cpu:3"):
        share_cores(devices, [0, 1, 2, 3])
    assert [*share_cores(devices, range(5))] == [0, 1]  # none for the card


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ([[2]], r"cores: got 1 lists, expected one for each of 2 workers"),
        ([[2], [4], [6]], r"cores: got 3 lists, expected one for each of 2 workers"),
        ([[2, 3, 9], [6]], r"cores: got \[3, 9\], expected some of \[2, 4, 6\]"),
    ],
)
def test_chosen_cores_that_do_not_fit_are_refused(chosen: list[list[int]], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        share_cores(parse_devices(2, 3), [2, 4, 6], chosen)


# Under a CPU quota.


@pytest.mark.parametrize(
    ("devices", "cpus", "wide_cores"),
    [
        (["cpu:0", "cpu:1"], None, (0, 1, 2, 3)),
        (["cpu:0", "cpu:1"], 3, (0, 1, 2, 3)),
        (["cpu:0", "cpu:1"], 2, (0, 1, 2, 3)),
        (["cpu:0", "cpu:1"], 1, ()),  # one thread, on whichever core
        (["cpu:0"], None, ()),
        (["cpu:0", "cpu:0"], None, ()),
        (["cpu:1"], None, ()),  # the other half is another process's
        (["cpu:0", "cpu:1", "cuda:0"], None, (0, 1, 2, 3)),
        (["cpu:0", "cuda:0"], None, ()),
        (["cpu:0", "cpu:2"], None, (0, 2, 3)),
    ],
)
def test_worker_knows_the_cores_of_all_on_the_cpu_where_more_threads_can_run_there(
    devices: list[str], cpus: int | None, wide_cores: tuple[int, ...]
) -> None:
    shares = share_cores(parse_devices(devices, 4), range(4), cpus=cpus)
    found = {
        s.wide_cores for s in shares.values() if isinstance(s, CoreShare) and s != shares.get(2)
    }
    assert found == {wide_cores}
    chosen = share_cores(parse_devices(2, 4), range(4), [[0], [1]])
    assert [s.wide_cores for s in chosen.values() if isinstance(s, CoreShare)] == [(), ()]


@given(cores=st.integers(2, 80), data=st.data(), workers=st.integers(1, 80))
def test_quota_is_dealt_out_as_threads_and_all_cores_are_kept(
    cores: int, data: st.DataObject, workers: int
) -> None:
    cpus = data.draw(st.integers(1, cores - 1))
    devices = parse_devices(workers, cpus)
    free = share_cores(devices, range(cores))
    threads = []
    for worker, share in share_cores(devices, range(cores), cpus=cpus).items():
        whole = free[worker]
        assert isinstance(whole, CoreShare)
        assert (share.cores, share.shared) == (whole.cores, whole.shared)
        assert share.threads is not None
        assert 1 <= share.threads <= len(share.cores)
        threads.append(share.threads)
    assert sum(threads) <= max(cpus, workers)
    assert max(threads) - min(threads) <= 1


@pytest.mark.parametrize(
    ("chosen", "cpus", "threads"),
    [
        ([[0, 1], [2, 3]], 6, [2, 2]),  # they do not come to the quota
        ([[0, 1], [2, 3]], 2, [1, 1]),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], 4, [2, 2]),
        ([[0, 1, 2, 3, 4, 5], [6, 7]], 4, [3, 1]),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], 2, [2, 2]),  # as without a quota: each has all of it
        ([[0], [1], [2], [3]], 1, [1, 1, 1, 1]),
    ],
)
def test_quota_is_dealt_out_over_the_cores_that_were_chosen(
    chosen: list[list[int]], cpus: int, threads: list[int]
) -> None:
    shares = share_cores(parse_devices(len(chosen), 8), range(8), chosen, cpus)
    assert [s.threads for s in shares.values() if isinstance(s, CoreShare)] == threads
    assert [[*s.cores] for s in shares.values() if isinstance(s, CoreShare)] == chosen


# Options.


@pytest.mark.parametrize(("options", "name", "value"), BAD_VALUES)
def test_bad_option_is_refused_by_its_name(
    options: Callable[..., Any], name: str, value: Any
) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}: got"):
        options(**{name: value})


def test_every_option_is_checked() -> None:
    checked = {(options, name) for options, name, _ in BAD_VALUES}
    every = {
        (options, field.name) for options in OPTIONS for field in dataclasses.fields(options())
    }
    assert checked == every


@given(backoff=st.floats(0, 1e308), limit=st.floats(0, 1e308), earlier=st.integers(0, 10_000))
def test_restart_delays_grow_up_to_their_limit(backoff: float, limit: float, earlier: int) -> None:
    policy = RestartPolicy(backoff=backoff, backoff_limit=limit)
    assert policy.delay(0) == 0.0
    assert 0.0 <= policy.delay(earlier) <= policy.delay(earlier + 1) <= limit


def test_engine_options_come_back_from_json_and_from_a_map() -> None:
    options = EngineOptions(
        threads=2, cores=[[0, 1]], variable_weights=["w"], session_config={"a": "b"}, provider="cpu"
    )
    assert from_map(EngineOptions, as_map(options)) == options
    assert from_map(EngineOptions, json.loads(json.dumps(as_map(options)))) == options


def test_options_of_a_class_of_ones_own_are_checked_kept_and_sent_as_the_others() -> None:
    class Own(EngineOptions):
        pass

    own = Own(session_config={"a": "b"})
    with pytest.raises(TypeError):
        own.session_config["a"] = "z"  # type: ignore[index]
    with pytest.raises(InvalidInputError, match=r"^threads: got 0,"):
        Own(threads=0)
    assert from_map(EngineOptions, as_map(own)) == EngineOptions(session_config={"a": "b"})


def test_engine_options_keep_their_entries_and_are_copied_and_pickled() -> None:
    entries = {"a": "b"}
    options = EngineOptions(threads=2, session_config=entries, free_dimensions={"n": 3})
    entries["c"] = "d"
    assert options.session_config == {"a": "b"}
    made: list[Any] = [pickle.loads(pickle.dumps(options)), copy.deepcopy(options)]  # noqa: S301 our own
    for again in made:
        assert again == options
        with pytest.raises(TypeError):
            again.session_config["a"] = "c"
