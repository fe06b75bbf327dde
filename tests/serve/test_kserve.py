"""What KServe's clients are answered. They run in processes of their own: see the Makefile."""

from importlib.util import find_spec

import pytest

from tests.process.scripts import Program
from tests.serve.servers import Server

pytestmark = pytest.mark.skipif(find_spec("kserve") is None, reason="kserve is not installed")

PREAMBLE = """
import asyncio, sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, RESTConfig
from kserve import InferInput, InferRequest

URL, GRPC = f"http://{sys.argv[1]}", sys.argv[2]

def rest():
    return InferenceRESTClient(RESTConfig(protocol="v2", timeout=60))

def asked(model, arrays, parameters=None, binary=True):
    inputs = []
    for name, (kind, array) in arrays.items():
        inputs.append(InferInput(name, [*array.shape], kind))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return InferRequest(model, inputs, request_id="mine", parameters=parameters)

def same(answer, expected):
    assert answer.id == "mine", answer
    outputs = {output.name: output for output in answer.outputs}
    for name, (kind, array) in expected.items():
        assert (outputs[name].datatype, [*outputs[name].shape]) == (kind, [*array.shape]), outputs[name]
        np.testing.assert_array_equal(outputs[name].as_numpy(), array, name)

X = np.arange(12, dtype=np.float32).reshape(3, 4)

"""


def run(text: str, server: Server) -> None:
    """Run a coroutine ``ask``."""
    with Program(f"{PREAMBLE}{text}\nasyncio.run(ask())", server.url, server.grpc) as program:
        ended = program.wait(100.0)
    assert ended.status == 0, ended.err


@pytest.mark.parametrize("question", [True, False], ids=["bytes", "json"])
@pytest.mark.parametrize("answer", [True, False], ids=["bytes", "json"])
def test_rest_client_gets_its_outputs(server: Server, question: bool, answer: bool) -> None:
    text = f"""
async def ask():
    async with rest() as client:
        request = asked("affine", {{"x": ("FP32", X)}}, {{"binary_data_output": {answer}}}, {question})
        same(await client.infer(URL, request, "affine"), {{"y": ("FP32", 2 * X + 1)}})
        texts = np.array([["a", "\\u20ac"], ["", "b" * 100]], object)
        request = asked("texts", {{"in_BYTES": ("BYTES", texts)}}, None, {question})
        (output,) = (await client.infer(URL, request, "texts")).outputs
        assert output.data == texts.ravel().tolist(), output.data
"""
    run(text, server)


@pytest.mark.parametrize("binary", [True, False], ids=["raw", "contents"])
def test_grpc_client_gets_its_outputs(server: Server, binary: bool) -> None:
    text = f"""
async def ask():
    async with InferenceGRPCClient(GRPC) as client:
        same(
            await client.infer(asked("affine", {{"x": ("FP32", X)}}, {{"priority": 1}}, {binary})),
            {{"y": ("FP32", 2 * X + 1)}},
        )
        texts = np.array([[b"a", b"\\0"], [b"", b"b" * 100]], object)
        answer = await client.infer(asked("texts", {{"in_BYTES": ("BYTES", texts)}}, None, {binary}))
        same(answer, {{"out_BYTES": ("BYTES", texts)}})
"""
    run(text, server)
