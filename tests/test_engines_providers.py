"""Tests of mcinfer/engines/providers.py: what a session gets for a device, and what errors of a card mean."""

from typing import Any

import pytest

from mcinfer.engines.base import EngineRequest, OutOfDeviceMemoryError
from mcinfer.engines.providers import (
    check_available,
    check_got,
    device_error,
    keeps_engines,
    provider_list,
)
from mcinfer.errors import BuildError, CardLostError, PredictError
from tests.engine_requests import engine_request

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"


def request(device: str, **options: Any) -> EngineRequest:
    return engine_request("m.onnx", device, **options)


STREAM = {"user_compute_stream": "7"}


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda:1", {}, [(CUDA, {"device_id": "1"}), (CPU, {})]),
        (
            "cuda:1",
            {
                "stream": 94465756917552,
                "memory_limit": 5000,
                # The limit is of the whole card; the worker's part is the one above.
                "provider_options": {"use_tf32": "0", "gpu_mem_limit": "20000", "device_id": "1"},
            },
            [
                (
                    CUDA,
                    {"device_id": "1", "user_compute_stream": "94465756917552", "use_tf32": "0"}
                    | {"gpu_mem_limit": "5000"},
                ),
                (CPU, {}),
            ],
        ),
        (
            "cuda:0",
            {"provider": "tensorrt", "stream": 7, "memory_limit": 5000}
            | {"provider_options": {"trt_fp16_enable": "1", "use_tf32": "0"}},
            [
                (TENSORRT, {"device_id": "0", "trt_fp16_enable": "1"} | STREAM),
                (CUDA, {"device_id": "0", "gpu_mem_limit": "5000", "use_tf32": "0"} | STREAM),
                (CPU, {}),
            ],
        ),
        (
            "cuda:2",
            {"provider": "tensorrt"},
            [(one, {"device_id": "2"}) for one in (TENSORRT, CUDA)] + [(CPU, {})],
        ),
        (
            "ascend:2",
            {"provider_options": {"precision_mode": "x"}, "memory_limit": 5},
            [("CANNExecutionProvider", {"device_id": "2", "precision_mode": "x"}), (CPU, {})],
        ),
    ],
)
def test_session_gets_the_devices_providers_with_their_own_options(
    device: str, options: dict[str, Any], expected: Any
) -> None:
    assert provider_list(request(device, **options)) == expected


@pytest.mark.parametrize(
    ("device", "options", "text"),
    [
        (
            "npu:3",
            {},
            r"no device npu:3, expected one of \['cpu:0', 'cuda:0', 'ascend:0'\]",
        ),
        (
            "cpu:0",
            {"provider": "cuda"},
            r"provider: got 'cuda' for device cpu:0, expected one of \['cpu'\]",
        ),
        ("cuda:1", {"provider_options": {"device_id": "0"}}, "device_id '0' for device cuda:1"),
        (
            "cuda:0",
            {"provider_options": {"user_compute_stream": "94465", "gpu_external_alloc": "1"}},
            r"got \['user_compute_stream', 'gpu_external_alloc'\], whose values are addresses",
        ),
        *(
            (
                "cuda:0",
                {"provider_options": {name: value}, "provider": provider},
                f"provider_options: got '{name}', expected it left out",
            )
            for provider, name, value in (
                (None, "enable_cuda_graph", "1"),
                (None, "enable_cuda_graph", "True"),
                ("tensorrt", "trt_cuda_graph_enable", "true"),
            )
        ),
        (
            "cuda:0",
            {"provider_options": {"trt_fp16_enable": "1"}},
            r"\['trt_fp16_enable'\] for the provider 'cuda', expected EngineOptions\(provider='tensorrt'\)",
        ),
    ],
)
def test_provider_and_options_that_do_not_fit_are_refused(
    device: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(BuildError, match=text):
        provider_list(request(device, **options))


def test_tensorrt_keeps_its_engines_unless_the_user_says_otherwise() -> None:
    tensorrt = request("cuda:0", provider="tensorrt", prepare="auto")
    first, second, _ = provider_list(tensorrt, "/cache/engines/k")
    assert first[1]["trt_engine_cache_enable"] == "1"
    assert first[1]["trt_engine_cache_path"] == "/cache/engines/k"
    assert not any(key.startswith("trt_") for key in second[1])
    others = [
        request("cuda:0", prepare="auto"),
        request("cuda:0", provider="tensorrt", prepare="never"),
        *(
            request("cuda:0", provider="tensorrt", provider_options=chosen, prepare="auto")
            for chosen in ({"trt_engine_cache_enable": "0"}, {"trt_engine_cache_path": "/own"})
        ),
    ]
    assert [keeps_engines(one) for one in others] == [False] * 4
    assert keeps_engines(tensorrt)
    assert provider_list(others[3], "/k")[0][1]["trt_engine_cache_path"] == "/own"


def test_fall_back_is_an_error_unless_it_is_allowed() -> None:
    wanted = request("cuda:0")
    with pytest.raises(
        BuildError, match=f"needs the {CUDA}, which this onnxruntime 1.31 does not have"
    ):
        check_available(wanted, [CPU], "1.31")
    with pytest.raises(
        BuildError, match=f"cuda:0 needs the {CUDA}, but the runtime fell back to {CPU}"
    ):
        check_got(wanted, CPU)
    check_available(wanted, [CUDA, CPU], "1.31")
    check_got(wanted, CUDA)
    allowed = request("cuda:0", allow_fallback=True)
    check_available(allowed, [CPU], "1.31")
    check_got(allowed, CPU)


# Messages as users have reported them (github.com/microsoft/onnxruntime: issues 16307, 22702, 5295, 26312),
# or as the sources of 1.31 write them.

_ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. "
    "Name:'/patch_embed/stages/stages.0/blocks/blocks.0/mlp/fc1/Conv' Status Message: "
    "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::"
    "AllocateRawInternal(size_t, bool, onnxruntime::Stream*, bool, onnxruntime::WaitNotificationFn) "
)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        (f"{_ARENA}Failed to allocate memory for requested buffer of size 939524096", 939524096),
        (f"{_ARENA}Available memory of 1048576 is smaller than requested bytes of 8388608", 8388608),
        (
            "CudaMempoolArena::AllocOnStream: cudaMallocFromPoolAsync failed on stream=94: "
            "out of memory (2), size=4096",
            4096,
        ),
        (
            "CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=/onnxruntime_src/onnxruntime/core/"
            "providers/cuda/cuda_allocator.cc ; line=74 ; expr=cudaMalloc((void**)&p, size); ",
            None,
        ),
    ],
)  # fmt: skip
def test_memory_that_a_card_lacks_fails_the_run_and_says_the_bytes(
    text: str, asked: int | None
) -> None:
    error = device_error(text)
    assert isinstance(error, OutOfDeviceMemoryError)
    assert isinstance(error, PredictError)
    assert error.asked == asked
    assert text in str(error)
    assert (f"which asked for {asked} bytes" in str(error)) is (asked is not None)


@pytest.mark.parametrize(
    "text",
    [
        (
            "Non-zero status code returned while running MemcpyFromHost node. Name:'Memcpy' Status Message: "
            "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=10cb601a4a05 ; "
            "file=/onnxruntime_src/onnxruntime/core/providers/cuda/gpu_data_transfer.cc ; line=63 ; "
            "expr=cudaMemcpyAsync(dst_data, src_data, bytes, cudaMemcpyHostToDevice, stream); "
        ),
        "CUDA failure 214: uncorrectable ECC error encountered ; GPU=1 ; hostname=h",
    ],
)
def test_context_that_is_dead_is_told_apart(text: str) -> None:
    error = device_error(text)
    assert isinstance(error, CardLostError)
    assert text in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "Non-zero status code returned while running MatMul node. Name:'' Status Message: matmul_helper.h:61",
        "CUDA failure 1: invalid argument ; GPU=0 ; hostname=h ; expr=cudaLaunchKernel; ",
        "size 700: illegal",
    ],
)
def test_other_errors_are_the_runs_own(text: str) -> None:
    assert device_error(text) is None
