"""Tests of mcinfer/mslite/context.py and of the checks that it uses."""

import re
from pathlib import Path
from typing import Any

import pytest

from mcinfer.mslite.context import Context


def part_of(context: Context, name: str) -> Any:
    return getattr(context, name) if name else context


CORES = "thread_affinity_core_list"
FAILED = "Set parallel failed, "

WRONG_TYPES = [
    ("cpu.thread_num", True, "cpu_thread_num must be int, but got <class 'bool'>."),
    ("cpu.thread_affinity_mode", 1.0, "cpu_thread_affinity_mode must be int, but got"),
    ("target", "cpu", "target must be list, but got <class 'str'>."),
    ("target", ["cpu", 1], "target element must be str, but got <class 'int'> at index 1."),
    (f"cpu.{CORES}", [0, "1"], f"cpu_{CORES} element must be int, but got <class 'str'> at index"),
    ("parallel.device_ids", [True], "device_ids element must be int, but got <class 'bool'> at"),
    ("parallel.config_path", 1, "config_path must be str, but got <class 'int'>."),
    ("parallel.config_info", {"a": {"b": 1}}, "config_info_value_value must be str, but got"),
]
WRONG_VALUES = [
    ("cpu.thread_num", -1, "cpu_thread_num must be a non-negative int."),
    ("parallel.workers_num", -1, f"{FAILED}workers_num must be a non-negative int."),
    ("target", ["NPU"], "target elements must be in ['cpu', 'gpu', 'ascend'], but got npu."),
    ("parallel.device_ids", [0, -1], f"{FAILED}device_ids contain a negative number. Got [0, -1]"),
    ("parallel.config_path", "/no", f"{FAILED}config_path does not exist! Got /no"),
    ("gpu.precision_mode", "fp8", "gpu_precision_mode must be in [enforce_fp32, preferred_fp16]"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG_TYPES + WRONG_VALUES)
def test_bad_value_is_refused_and_changes_nothing(name: str, value: Any, text: str) -> None:
    part, _, attribute = name.rpartition(".")
    holder = part_of(Context(), part)
    before = getattr(holder, attribute)
    error = TypeError if (name, value, text) in WRONG_TYPES else ValueError
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        setattr(holder, attribute, value)
    assert getattr(holder, attribute) == before


def test_accelerator_comes_before_the_cpu_and_two_are_refused() -> None:
    context = Context()
    nothing: Any
    for nothing in ([], None):
        context.target = ["gpu"]
        context.target = nothing
        assert context.target == ["cpu"]
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


def test_unknown_affinity_mode_is_0_with_a_warning_at_the_callers_line() -> None:
    cpu = Context().cpu
    cpu.thread_affinity_mode = 2
    assert cpu.thread_affinity_mode == 2
    with pytest.warns(UserWarning, match="but got 3: 0 is used") as caught:
        cpu.thread_affinity_mode = 3
    assert cpu.thread_affinity_mode == 0
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("rank", "size", "found"), [("3", "4", (3, 4)), ("", "", (0, 1))])
def test_ranks_come_from_the_launcher(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, found: tuple[int, int]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", size)
    gpu = Context().gpu
    assert (gpu.rank_id, gpu.group_size) == found
    with pytest.raises(AttributeError):
        gpu.rank_id = 1  # type: ignore[misc]


def test_config_info_adds_sections_and_replaces_those_it_names(tmp_path: Path) -> None:
    parallel = Context().parallel
    parallel.config_info = {"b": {"y": "1", "x": "2"}, "a": {"z": "3"}}
    parallel.config_info = {"b": {"x": "4", "w": "5"}}
    assert parallel.sections == {"a": {"z": "3"}, "b": {"x": "4", "w": "5"}}
    assert parallel.config_info == "a: z 3\nb: w 5\nx 4"
    parallel.config_path = str(tmp_path)
    parallel.config_path = ""  # changes nothing
    assert parallel.config_path == str(tmp_path)


@pytest.mark.parametrize("part", ["", "parallel"])
def test_unknown_attribute_is_kept_with_a_warning_that_names_it(part: str) -> None:
    holder = part_of(Context(), part)
    with pytest.warns(UserWarning, match="no attribute 'tread_num'") as caught:
        holder.tread_num = 4
    assert holder.tread_num == 4
    assert caught[0].filename == __file__
