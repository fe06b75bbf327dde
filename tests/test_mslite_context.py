"""Tests of mcinfer/mslite/context.py and of the checks that it uses."""

import re
from pathlib import Path
from typing import Any

import pytest

from mcinfer.mslite.context import Context

Number = pytest.mark.parametrize(
    ("part", "attribute", "name"),
    [
        ("cpu", "thread_num", "cpu_thread_num"),
        ("cpu", "inter_op_parallel_num", "cpu_inter_op_parallel_num"),
        ("gpu", "device_id", "gpu_device_id"),
        ("ascend", "device_id", "ascend_device_id"),
        ("ascend", "rank_id", "ascend_rank_id"),
        ("parallel", "workers_num", "workers_num"),
    ],
)

NOT_INTS: list[Any] = ["1", 1.0, None, True]


def exactly(text: str) -> str:
    return f"^{re.escape(text)}$"


# Lists.


@pytest.mark.parametrize(
    ("part", "attribute", "value"),
    [
        ("", "target", ["Ascend", "cpu"]),
        ("cpu", "thread_affinity_core_list", [1, 0]),
        ("parallel", "device_ids", [1, 0]),
    ],
)
def test_list_is_kept_as_it_was_when_it_was_set(
    part: str, attribute: str, value: list[Any]
) -> None:
    context = Context()
    holder = getattr(context, part) if part else context
    given = [*value]
    setattr(holder, attribute, given)
    given.append(9)
    getattr(holder, attribute).append(9)
    assert getattr(holder, attribute) == value
    assert getattr(Context() if not part else getattr(Context(), part), attribute) != value


@pytest.mark.parametrize("value", [[], None, "", 0])
def test_target_set_to_nothing_is_the_cpu_again(value: Any) -> None:
    context = Context()
    context.target = ["gpu"]
    context.target = value
    assert context.target == ["cpu"]


@pytest.mark.parametrize(
    ("part", "attribute", "value", "error", "text"),
    [
        ("", "target", "cpu", TypeError, "target must be list, but got <class 'str'>."),
        (
            *("", "target", ["cpu", 1], TypeError),
            "target element must be str, but got <class 'int'> at index 1.",
        ),
        (
            *("", "target", ["cpu", "NPU"], ValueError),
            "target elements must be in ['cpu', 'gpu', 'ascend'], but got npu.",
        ),
        (
            *("cpu", "thread_affinity_core_list", None, TypeError),
            "cpu_thread_affinity_core_list must be list, but got <class 'NoneType'>.",
        ),
        (
            *("cpu", "thread_affinity_core_list", [0, "1"], TypeError),
            "cpu_thread_affinity_core_list element must be int, but got <class 'str'> at index 1.",
        ),
        (
            *("parallel", "device_ids", 1, TypeError),
            "device_ids must be list, but got <class 'int'>.",
        ),
        (
            *("parallel", "device_ids", [0, True], TypeError),
            "device_ids element must be int, but got <class 'bool'> at index 1.",
        ),
        (
            *("parallel", "device_ids", [0, -1], ValueError),
            "Set parallel failed, device_ids contain a negative number. Got [0, -1]",
        ),
    ],
)
def test_bad_list_is_refused_and_changes_nothing(
    part: str, attribute: str, value: Any, error: type[Exception], text: str
) -> None:
    context = Context()
    holder = getattr(context, part) if part else context
    before = getattr(holder, attribute)
    with pytest.raises(error, match=exactly(text)):
        setattr(holder, attribute, value)
    assert getattr(holder, attribute) == before


@pytest.mark.parametrize(
    ("target", "infos"),
    [
        (["cpu", "CPU"], ["cpu"]),
        (["ASCEND"], ["ascend", "cpu"]),
        (["cpu", "Gpu", "gpu"], ["gpu", "cpu"]),
    ],
)
def test_accelerator_comes_before_the_cpu_behind_it(target: list[str], infos: list[str]) -> None:
    context = Context()
    context.target = target
    assert context.device_infos == infos


def test_more_than_two_device_infos_are_refused_when_the_model_is_built() -> None:
    context = Context()
    context.target = ["gpu", "ascend"]
    with pytest.raises(ValueError, match="at most two"):
        _ = context.device_infos


# Numbers.


@Number
def test_number_that_is_no_int_or_negative_is_refused(part: str, attribute: str, name: str) -> None:
    holder = getattr(Context(), part)
    for value in NOT_INTS:
        with pytest.raises(TypeError, match=exactly(f"{name} must be int, but got {type(value)}.")):
            setattr(holder, attribute, value)
    with pytest.raises(ValueError, match=rf"{name} must be a non-negative int\.$"):
        setattr(holder, attribute, -1)
    assert getattr(holder, attribute) == 0


# Precision and texts.


@pytest.mark.parametrize(
    ("part", "default", "modes"),
    [
        ("cpu", "enforce_fp32", "enforce_fp32, preferred_fp16"),
        ("gpu", "enforce_fp32", "enforce_fp32, preferred_fp16"),
        (
            "ascend",
            "",
            "enforce_fp32, preferred_fp32, enforce_fp16, enforce_origin, preferred_optimal",
        ),
    ],
)
def test_precision_mode_is_one_of_those_of_its_part(part: str, default: str, modes: str) -> None:
    holder = getattr(Context(), part)
    assert holder.precision_mode == default
    for mode in modes.split(", "):
        holder.precision_mode = mode
        assert f"precision_mode: {mode},\n" in str(holder)
    text = f"{part}_precision_mode must be in [{modes}], but got fp8."
    with pytest.raises(ValueError, match=exactly(text)):
        holder.precision_mode = "fp8"
    text = f"{part}_precision_mode must be str, but got <class 'int'>."
    with pytest.raises(TypeError, match=exactly(text)):
        holder.precision_mode = 1
    assert holder.precision_mode == modes.split(", ")[-1]


# CPU.


def test_unknown_affinity_mode_is_none_with_a_warning_at_the_callers_line() -> None:
    cpu = Context().cpu
    for mode in (1, 2):
        cpu.thread_affinity_mode = mode
        assert cpu.thread_affinity_mode == mode
    with pytest.warns(UserWarning, match="but got 3: 0 is used") as caught:
        cpu.thread_affinity_mode = 3
    assert cpu.thread_affinity_mode == 0
    assert caught[0].filename == __file__
    with pytest.raises(TypeError, match=r"^cpu_thread_affinity_mode must be int"):
        cpu.thread_affinity_mode = "1"  # type: ignore[assignment]


# GPU.


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    gpu = Context().gpu
    assert (gpu.rank_id, gpu.group_size) == (3, 4)


# Parallel.


def test_config_info_adds_sections_and_replaces_those_it_names() -> None:
    parallel = Context().parallel
    parallel.config_info = {"b": {"y": "1", "x": "2"}, "a": {"z": "3"}}
    parallel.config_info = {"b": {"x": "4", "w": "5"}}
    assert parallel.sections == {"a": {"z": "3"}, "b": {"x": "4", "w": "5"}}
    assert parallel.config_info == "a: z 3\nb: w 5\nx 4"


def test_bad_config_info_is_refused_whole() -> None:
    parallel = Context().parallel
    bad: Any = {"a": {"b": "c"}, "d": {"e": 1}}
    text = "config_info_value_value must be str, but got <class 'int'>."
    with pytest.raises(TypeError, match=exactly(text)):
        parallel.config_info = bad
    assert parallel.sections == {}


def test_config_path_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.touch()
    parallel = Context().parallel
    parallel.config_path = str(file)
    with pytest.raises(ValueError, match=r"^Set parallel failed, config_path does not exist!"):
        parallel.config_path = str(tmp_path / "missing.ini")
    text = "config_path must be str, but got <class 'pathlib"
    with pytest.raises(TypeError, match=re.escape(text)):
        parallel.config_path = file  # type: ignore[assignment]
    parallel.config_path = ""  # changes nothing
    assert parallel.config_path == str(file)


# Unknown attributes.


@pytest.mark.parametrize("part", [None, "cpu", "parallel"])
def test_unknown_attribute_is_kept_with_a_warning_that_names_it(part: str | None) -> None:
    context = Context()
    holder: Any = context if part is None else getattr(context, part)
    with pytest.warns(UserWarning, match="no attribute 'tread_num'") as caught:
        holder.tread_num = 4
    assert holder.tread_num == 4
    assert caught[0].filename == __file__
