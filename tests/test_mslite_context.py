"""Tests of mcinfer/mslite/context.py and of the checks that it uses."""

import re
from pathlib import Path
from typing import Any

import pytest

from mcinfer.mslite.context import Context


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


def part_of(context: Context, name: str) -> Any:
    return getattr(context, name) if name else context


# Values that are refused.

NUMBERS = [
    ("cpu", "thread_num", "cpu_thread_num"),
    ("cpu", "inter_op_parallel_num", "cpu_inter_op_parallel_num"),
    ("gpu", "device_id", "gpu_device_id"),
    ("ascend", "device_id", "ascend_device_id"),
    ("ascend", "rank_id", "ascend_rank_id"),
    ("parallel", "workers_num", "workers_num"),
]
PRECISIONS = {
    "cpu": "enforce_fp32, preferred_fp16",
    "gpu": "enforce_fp32, preferred_fp16",
    "ascend": "enforce_fp32, preferred_fp32, enforce_fp16, enforce_origin, preferred_optimal",
}
CORES = "thread_affinity_core_list"

WRONG_TYPES = [
    *(
        (part, name, "1", f"{text} must be int, but got <class 'str'>.")
        for part, name, text in NUMBERS
    ),
    ("cpu", "thread_num", True, "cpu_thread_num must be int, but got <class 'bool'>."),
    (
        "cpu",
        "thread_affinity_mode",
        1.0,
        "cpu_thread_affinity_mode must be int, but got <class 'float'>.",
    ),
    ("", "target", "cpu", "target must be list, but got <class 'str'>."),
    ("", "target", ["cpu", 1], "target element must be str, but got <class 'int'> at index 1."),
    ("", "group_info_file", 1, "group_info_file must be str, but got <class 'int'>."),
    ("gpu", "provider", None, "gpu_provider must be str, but got <class 'NoneType'>."),
    ("cpu", CORES, None, f"cpu_{CORES} must be list, but got <class 'NoneType'>."),
    ("cpu", CORES, [0, "1"], f"cpu_{CORES} element must be int, but got <class 'str'> at index 1."),
    ("parallel", "device_ids", 1, "device_ids must be list, but got <class 'int'>."),
    (
        "parallel",
        "device_ids",
        [0, True],
        "device_ids element must be int, but got <class 'bool'> at index 1.",
    ),
    ("parallel", "config_path", 1, "config_path must be str, but got <class 'int'>."),
    (
        "parallel",
        "config_info",
        {"a": {"b": 1}},
        "config_info_value_value must be str, but got <class 'int'>.",
    ),
    *(
        (part, "precision_mode", 1, f"{part}_precision_mode must be str, but got <class 'int'>.")
        for part in PRECISIONS
    ),
]
WRONG_VALUES = [
    *((part, name, -1, f"{text} must be a non-negative int.") for part, name, text in NUMBERS[:-1]),
    ("parallel", "workers_num", -1, "Set parallel failed, workers_num must be a non-negative int."),
    ("", "target", ["NPU"], "target elements must be in ['cpu', 'gpu', 'ascend'], but got npu."),
    (
        *("parallel", "device_ids", [0, -1]),
        "Set parallel failed, device_ids contain a negative number. Got [0, -1]",
    ),
    (
        *("parallel", "config_path", "/nowhere"),
        "Set parallel failed, config_path does not exist! Got /nowhere",
    ),
    *(
        (part, "precision_mode", "fp8", f"{part}_precision_mode must be in [{modes}], but got fp8.")
        for part, modes in PRECISIONS.items()
    ),
]


@pytest.mark.parametrize(("part", "attribute", "value", "text"), WRONG_TYPES + WRONG_VALUES)
def test_bad_value_is_refused_and_changes_nothing(
    part: str, attribute: str, value: Any, text: str
) -> None:
    error = TypeError if ", but got <class" in text else ValueError
    holder = part_of(Context(), part)
    before = getattr(holder, attribute)
    with pytest.raises(error, match=exactly(text)):
        setattr(holder, attribute, value)
    assert getattr(holder, attribute) == before


# Values that are kept.


@pytest.mark.parametrize(
    ("part", "attribute", "value"),
    [
        ("", "target", ["Ascend", "cpu"]),
        ("cpu", CORES, [1, 0]),
        ("parallel", "device_ids", [1, 0]),
    ],
)
def test_list_goes_in_and_out_as_a_copy(part: str, attribute: str, value: list[Any]) -> None:
    holder = part_of(Context(), part)
    given = [*value]
    setattr(holder, attribute, given)
    given.append(9)
    getattr(holder, attribute).append(9)
    assert getattr(holder, attribute) == value
    assert getattr(part_of(Context(), part), attribute) != value


@pytest.mark.parametrize("value", [[], None, "", 0])
def test_target_set_to_nothing_is_the_cpu_again(value: Any) -> None:
    context = Context()
    context.target = ["gpu"]
    context.target = value
    assert context.target == ["cpu"]


def test_accelerator_comes_before_the_cpu_and_two_are_refused() -> None:
    context = Context()
    for target, infos in (
        (["cpu", "CPU"], ["cpu"]),
        (["ASCEND"], ["ascend", "cpu"]),
        (["cpu", "Gpu", "gpu"], ["gpu", "cpu"]),
    ):
        context.target = target
        assert context.device_infos == infos
    context.target = ["gpu", "ascend"]
    with pytest.raises(ValueError, match="at most two"):
        _ = context.device_infos


@pytest.mark.parametrize("part", PRECISIONS)
def test_precision_mode_is_printed(part: str) -> None:
    holder = part_of(Context(), part)
    assert holder.precision_mode == ("" if part == "ascend" else "enforce_fp32")
    for mode in PRECISIONS[part].split(", "):
        holder.precision_mode = mode
        assert f"precision_mode: {mode},\n" in str(holder)


def test_unknown_affinity_mode_is_0_with_a_warning_at_the_callers_line() -> None:
    cpu = Context().cpu
    for mode in (1, 2):
        cpu.thread_affinity_mode = mode
        assert cpu.thread_affinity_mode == mode
    with pytest.warns(UserWarning, match="but got 3: 0 is used") as caught:
        cpu.thread_affinity_mode = 3
    assert cpu.thread_affinity_mode == 0
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("rank", "size", "found"), [("3", "4", (3, 4)), (None, None, (0, 1)), ("first", "²", (0, 1))]
)
def test_ranks_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, size: str | None, found: tuple[int, int]
) -> None:
    for name, value in (("RANK", rank), ("SIZE", size)):
        monkeypatch.delenv(f"OMPI_COMM_WORLD_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    gpu = Context().gpu
    assert (gpu.rank_id, gpu.group_size) == found


def test_config_info_adds_sections_and_replaces_those_it_names() -> None:
    parallel = Context().parallel
    parallel.config_info = {"b": {"y": "1", "x": "2"}, "a": {"z": "3"}}
    parallel.config_info = {"b": {"x": "4", "w": "5"}}
    assert parallel.sections == {"a": {"z": "3"}, "b": {"x": "4", "w": "5"}}
    assert parallel.config_info == "a: z 3\nb: w 5\nx 4"


def test_config_path_set_to_nothing_stays(tmp_path: Path) -> None:
    parallel = Context().parallel
    parallel.config_path = str(tmp_path)
    parallel.config_path = ""
    assert parallel.config_path == str(tmp_path)


@pytest.mark.parametrize("part", ["", "cpu", "parallel"])
def test_unknown_attribute_is_kept_with_a_warning_that_names_it(part: str) -> None:
    holder = part_of(Context(), part)
    with pytest.warns(UserWarning, match="no attribute 'tread_num'") as caught:
        holder.tread_num = 4
    assert holder.tread_num == 4
    assert caught[0].filename == __file__
