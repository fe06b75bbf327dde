"""Tests of mcinfer/mslite/_targets.py: from a context to engines and devices."""

import os
from pathlib import Path
from typing import Any

import pytest

from mcinfer.errors import BuildError, InvalidInputError
from mcinfer.mslite._targets import (
    Attempt,
    ModelType,
    Source,
    attempts,
    count_workers,
    model_type_of,
    open_first,
    pinned_cores,
)
from mcinfer.mslite.context import Context


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores, and no word of the user's about devices."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    monkeypatch.delenv("MCINFER_STRICT_DEVICE", raising=False)


def context_of(*target: str, **settings: Any) -> Context:
    """A context; a setting is named `part_attribute`."""
    context = Context()
    context.target = [*target]
    for name, value in settings.items():
        part, _, attribute = name.partition("_")
        setattr(getattr(context, part), attribute, value)
    return context


def source_of(
    context: Context,
    model_type: ModelType = ModelType.ONNX,
    sections: Any = None,
    model: str | bytes = "model",
) -> Source:
    return Source(model, model_type, context, sections or {})


def ways(context: Context, model_type: ModelType = ModelType.ONNX) -> list[str]:
    """What would be tried, in words."""
    return [
        f"{attempt.engine} {attempt.kind}:{attempt.index}"
        for attempt in attempts(source_of(context, model_type))
    ]


def test_type_is_that_of_the_ending_else_what_is_said_or_the_content_shows(tmp_path: Path) -> None:
    lite, mindir, onnx = ModelType.MINDIR_LITE, ModelType.MINDIR, ModelType.ONNX
    os.mkfifo(tmp_path / "pipe.mindir")
    for name, said, found in (
        ("m.ONNX", lite, onnx),
        ("m.ms", mindir, lite),
        ("m.mindir", lite, lite),
        ("m", onnx, onnx),
        ("", mindir, mindir),  # a folder, no file, and nothing to wait for
        ("none.mindir", mindir, mindir),
        ("pipe.mindir", mindir, mindir),
    ):
        assert model_type_of(str(tmp_path / name), said) is found
    # The first field of the content shows it, also of what programs for MindSpore Lite call MINDIR.
    for content, found in (
        (b"\x08\x08\x12", onnx),
        (b"\x0a\x05", mindir),
        (b"\x08\x00", mindir),
        (b"", mindir),
    ):
        path = tmp_path / "matmul0.mindir"
        path.write_bytes(content)
        for model in (content, str(path)):
            assert model_type_of(model) is model_type_of(model, mindir) is found
            assert model_type_of(model, lite) is lite


@pytest.mark.parametrize(
    ("target", "model_type", "expected"),
    [
        (["cpu"], ModelType.ONNX, ["onnxruntime cpu:0"]),
        (["cpu"], ModelType.MINDIR, ["mindspore cpu:0"]),
        (["cpu", "gpu"], ModelType.ONNX, ["onnxruntime cuda:1", "onnxruntime cpu:0"]),
        (["ascend"], ModelType.ONNX, ["onnxruntime ascend:2", "onnxruntime cpu:0"]),
        (["Ascend"], ModelType.MINDIR, ["mindspore ascend:2", "mindspore cpu:0"]),
    ],
)
def test_targets_are_tried_in_turn_and_the_cpu_last(
    target: list[str], model_type: ModelType, expected: list[str]
) -> None:
    context = context_of(*target, gpu_device_id=1, ascend_device_id=2)
    assert ways(context, model_type) == expected


def test_cpu_is_no_backup_where_the_user_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCINFER_STRICT_DEVICE", "1")
    assert ways(context_of("gpu")) == ["onnxruntime cuda:0"]
    monkeypatch.setenv("MCINFER_STRICT_DEVICE", "yes")
    assert len(ways(context_of("gpu"))) == 2


def only(context: Context, sections: Any = None, model_type: ModelType = ModelType.ONNX) -> Attempt:
    return attempts(source_of(context, model_type, sections))[0]


@pytest.mark.parametrize(
    ("settings", "provider", "provider_options", "remark"),
    [
        ({}, None, {"use_tf32": "0"}, ""),
        ({"gpu_precision_mode": "preferred_fp16"}, None, {"use_tf32": "1"}, "TensorFloat-32"),
        ({"gpu_provider": "tensorrt"}, "tensorrt", {"trt_fp16_enable": "0"}, ""),
        (
            {"gpu_provider": "tensorrt", "gpu_precision_mode": "preferred_fp16"},
            "tensorrt",
            {"trt_fp16_enable": "1"},
            "",
        ),
        ({"gpu_provider": "other"}, None, {"use_tf32": "0"}, "gpu provider 'other' is unknown"),
    ],
)
def test_precision_and_provider_of_a_gpu_act_or_are_remarked(
    settings: dict[str, Any], provider: str | None, provider_options: dict[str, str], remark: str
) -> None:
    attempt = only(context_of("gpu", **settings))
    original = only(context_of("gpu", **settings), model_type=ModelType.MINDIR)
    assert original.options.provider_options == {}
    assert (attempt.kind, attempt.options.provider) == ("cuda", provider)
    assert dict(attempt.options.provider_options) == provider_options
    assert len(attempt.remarks) == bool(remark)
    assert remark in "".join(attempt.remarks)


FORCED = {"precision_mode": "enforce_fp32", "provider": "x"}


@pytest.mark.parametrize(
    ("settings", "entries", "for_onnx"),
    [
        ({}, {}, {}),  # left to the runtime
        (
            {"precision_mode": "preferred_fp32"},
            {},
            {"precision_mode": "allow_fp32_to_fp16"},
        ),
        ({"rank_id": 3, "provider": "ge"}, {}, {}),
        # The configuration overrides the context.
        (
            {"precision_mode": "enforce_fp16", "provider": "ge"},
            FORCED,
            {"precision_mode": "force_fp32"},
        ),
    ],
)
def test_settings_of_an_ascend_are_said_in_the_runtimes_words(
    settings: dict[str, Any],
    entries: dict[str, str],
    for_onnx: dict[str, str],
) -> None:
    context = context_of("ascend", **{f"ascend_{name}": v for name, v in settings.items()})
    sections = {"ascend_context": entries}
    attempt = only(context, sections)
    assert attempt.options.provider_options == for_onnx
    assert bool(attempt.remarks) == ("provider" in settings)
    assert all("no effect on ONNX models" in remark for remark in attempt.remarks)
    original = only(context, sections, model_type=ModelType.MINDIR)
    assert original.options.provider_options == {}


def test_model_of_mindspore_lites_own_format_is_refused() -> None:
    with pytest.raises(BuildError, match="expected an ONNX or a MindIR model"):
        ways(context_of("cpu"), ModelType.MINDIR_LITE)


@pytest.mark.parametrize(
    ("context", "kind", "wanted", "device_ids", "count"),
    [
        (context_of("cpu"), "cpu", 0, [], 2),
        (context_of("cpu"), "cpu", 40, [], 40),
        (context_of("cpu", cpu_thread_num=3), "cpu", 0, [], 2),
        (context_of("cpu", cpu_thread_num=16), "cpu", 0, [], 1),
        (context_of("gpu"), "cuda", 0, [0, 1, 2], 3),
        (context_of("gpu"), "cuda", 4, [0, 1], 4),
        # The CPU serves in the place of one that is not there.
        (context_of("gpu"), "cpu", 0, [0, 1, 2], 2),
    ],
)
def test_number_of_workers_is_what_is_wanted_else_upstreams_rule(
    context: Context, kind: str, wanted: int, device_ids: list[int], count: int
) -> None:
    assert count_workers(context, kind, wanted, device_ids) == count


def test_workers_and_cores_that_do_not_fit_the_machine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"workers_num: got 41, expected at most 5 for"):
        count_workers(context_of("cpu"), "cpu", 41, [])
    for threads, listed, workers, text in (
        (2, [0, 1], 2, "got 2 cores, expected threads x workers = 2 x 2"),
        (1, [8], 1, r"got \[8\], expected some of \[0, 1, 2, 3, 4, 5, 6, 7\]"),
    ):
        context = context_of("cpu", cpu_thread_num=threads, cpu_thread_affinity_core_list=listed)
        with pytest.raises(InvalidInputError, match=f"core_list: {text}"):
            pinned_cores(context, workers)


def test_cores_of_the_list_are_dealt_to_the_workers() -> None:
    for threads, listed, dealt in (
        (2, [4, 5, 6, 7], ((4, 5), (6, 7))),
        (0, [4, 5, 6, 7], ((4, 5), (6, 7))),
        (2, [0, 0, 1, 1], ((0,), (1,))),  # each core once
        (1, [3, 0], ((3,), (0,))),
        (1, [], None),
    ):
        context = context_of("cpu", cpu_thread_num=threads, cpu_thread_affinity_core_list=listed)
        assert pinned_cores(context, 2) == dealt
    [remark] = only(context_of("cpu", cpu_thread_affinity_mode=1)).remarks
    assert (
        remark == "cpu thread_affinity_mode has no effect: name cores in thread_affinity_core_list"
    )


def test_entries_without_an_effect_are_in_one_warning_at_the_callers_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "names").write_text("w")
    sections = {
        "model_file": {"mindir_path": "/"},
        "ascend_context": {
            "precision_mode": "enforce_fp16",
            "provider": "ge",
            "variable_weights_file": str(tmp_path / "names"),
            "shareable_weight_pid_list": "1",
            "rank_table_file": "table.json",
        },
        "strange": {"entry": "1"},
    }
    onnx, mindir = ModelType.ONNX, ModelType.MINDIR
    of_processes = ("rank_table_file", "shareable_weight_pid_list")
    of_onnx = ("mindir_path", "precision_mode", "provider")
    for target, model_type, model, alone, unused in (
        ("cpu", onnx, b"", True, {"precision_mode", "provider"}),
        ("ascend", onnx, "m", True, {"mindir_path", "provider"}),
        ("ascend", mindir, "m", True, {*of_onnx, "rank_table_file"}),
        ("ascend", mindir, "m", False, {*of_onnx, *of_processes}),
    ):
        source = source_of(context_of(target), model_type, sections, model)
        with pytest.warns(UserWarning, match="without an effect in mcinfer: ") as caught:
            open_first(source, lambda _: None, alone=alone, stacklevel=1)
        [warning] = caught
        found = str(warning.message).partition("mcinfer: ")[2].split(", ")
        assert {text.partition("] ")[2] for text in found} == unused | {"entry"}
        assert warning.filename == __file__
