"""Operators of a real library, that of onnxruntime-extensions, in a model that is served."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray

from tests.process.waiting import wait_until
from tests.serve.conftest import Serve
from tests.serve.servers import Server

PACKAGE = find_spec("onnxruntime_extensions")

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="onnxruntime-extensions is not installed")

UPPER = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]>
m (string[n] x, float[n, 4] z) => (string[n] y, float[n, 4] negative, float[n, 4] positive) {
    y = ai.onnx.contrib.StringUpper(x)
    negative, positive = ai.onnx.contrib.NegPos(z)
}"""

Z = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def library() -> Path:
    """As its `get_library_path`. To import it chooses protobuf without upb, for later servers, too."""
    origin = PACKAGE.origin if PACKAGE else None
    (found,) = Path(origin or "").parent.glob("_extensions_pydll*.so")
    return found


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Has the model *upper*."""
    folder = tmp_path / "models" / "upper" / "1"
    folder.mkdir(parents=True)
    onnx.save(onnx.parser.parse_model(UPPER), folder / "model.onnx")
    return tmp_path / "models"


def output(served: Server) -> tuple[Any, NDArray[Any], NDArray[Any]]:
    inputs = [
        {"name": "x", "datatype": "BYTES", "shape": [2], "data": ["abc", "d e"]},
        {"name": "z", "datatype": "FP32", "shape": [2, 4], "data": Z.ravel().tolist()},
    ]
    answer = served.ask("/v2/models/upper/infer", {"inputs": inputs})
    assert answer.status == 200, answer.body
    y, negative, positive = (each["data"] for each in answer.json["outputs"])
    return y, np.reshape(negative, (2, 4)), np.reshape(positive, (2, 4))


@pytest.mark.parametrize(
    "how",
    [("--devices", 2), ("--devices", "inline"), ("--processes", 2)],
    ids=["workers", "inline", "processes"],
)
@pytest.mark.parametrize("by_configuration", [False, True], ids=["option", "configuration"])
def test_operators_of_a_library_are_run(
    serve: Serve, repository: Path, library: Path, how: tuple[object, ...], by_configuration: bool
) -> None:
    if by_configuration:
        text = f'model_operations {{ op_library_filename: "{library}" }}'
        (repository / "upper" / "config.pbtxt").write_text(text)
    option = () if by_configuration else ("--custom-ops", library)
    served = serve("--repository", repository, *how, *option)
    y, negative, positive = output(served)
    assert y == ["ABC", "D E"]
    np.testing.assert_array_equal(negative, np.minimum(Z, 0))
    np.testing.assert_array_equal(positive, np.maximum(Z, 0))
    assert served.end() == 143


def test_model_whose_library_is_not_given_is_not_served(serve: Serve, repository: Path) -> None:
    served = serve("--repository", repository, "--devices", "inline")
    (entry,) = served.ask("/v2/repository/index", b"{}").json
    assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "the server's log says why")
    wait_until(lambda: "ai.onnx.contrib" in served.text())
