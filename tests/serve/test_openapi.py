"""What the server says of its addresses is OpenAPI, and what it does."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.serve import models
from tests.serve.conftest import Serve
from tests.serve.servers import Server, request_of


@pytest.fixture
def document(server: Server) -> Any:
    return server.ask("/openapi.json").json


NAMES = {"model": "affine", "version": "1", "name": "region"}


def test_document_is_openapi_3_1_and_has_no_operation_without_a_summary(document: Any) -> None:
    OpenAPIV31SpecValidator(document).validate()
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert len(operations) > 30
    assert all(each["summary"] for each in operations)
    assert document["security"] == []


POSTED = {
    "/v2/models/{model}/infer": request_of(np.ones((2, 4), np.float32)),
    "/v2/models/{model}/versions/{version}/infer": request_of(np.ones((2, 9), np.float32)),
    "/v2/repository/index": {"ready": True},
    "/v2/repository/models/{model}/load": {"parameters": {"config": "no JSON"}},
    "/v2/systemsharedmemory/region/{name}/register": {"key": "/none", "byte_size": 1},
    "/v2/systemsharedmemory/region/{name}/unregister": {},
    "/v2/systemsharedmemory/unregister": {},
    "/v2/cudasharedmemory/region/{name}/register": {},
    "/v2/cudasharedmemory/region/{name}/unregister": {},
    "/v2/cudasharedmemory/unregister": {},
    "/v2/trace/setting": {},
    "/v2/models/{model}/trace/setting": {"trace_level": ["TIMESTAMPS"]},
    "/v2/repository/models/{model}/unload": None,  # it would be missed
    "/v2/logging": None,
}
"""Bodies by path; None is not sent."""


def test_every_address_answers_as_the_document_says(server: Server, document: Any) -> None:
    components = document["components"]
    for schema in components["schemas"].values():
        schema["additionalProperties"] = False
    for path, operations in document["paths"].items():
        address = re.sub(r"{(\w+)}", lambda found: NAMES[found[1]], path)
        for method, operation in operations.items():
            body = POSTED[path] if method == "post" else None
            if method == "post" and body is None:
                continue
            answer = server.ask(address, body)
            said = operation["responses"]
            found = said.get(str(answer.status)) or said[f"{answer.status // 100}XX"]
            if "$ref" in found:
                found = components["responses"]["error"]
            assert answer.status not in (404, 405), path
            kind = answer.headers["content-type"].partition(";")[0]
            schema = found["content"][kind]["schema"]
            if kind == "application/json":
                OAS31Validator({**schema, "components": components}).validate(answer.json)


def test_server_with_keys_says_that_all_but_probes_of_health_need_one(
    serve: Serve, tmp_path: Path
) -> None:
    key = tmp_path / "keys"
    key.write_text("secret")
    served = serve(models.write(tmp_path)[0], "--devices", "inline", "--api-key-file", key)
    said = served.ask("/openapi.json", headers={"Authorization": "Bearer secret"}).json
    assert said["security"] == [{"bearer": []}, {"basic": []}]
    free = {path for path, each in said["paths"].items() if "security" in each.get("get", {})}
    assert free == {"/v2/health/live", "/v2/health/ready"}
    for path in free:
        assert served.ask(path).status == 200
    assert served.ask("/openapi.json").status == 401
