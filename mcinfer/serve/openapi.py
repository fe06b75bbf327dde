"""The server's description in OpenAPI 3.1, from the table that requests are routed by.

Schemas are those of the types by which requests are read and answers are checked. The page is no part of it.

Source: https://spec.openapis.org/oas/v3.1.1.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import msgspec

from mcinfer import __version__
from mcinfer.serve.documents import Error, InferDocument, document_of

_SCHEMAS = "#/components/schemas/{name}"
_TEXT = {"type": "string"}

_INFER_ERRORS = {
    400: "The request is wrong.",
    404: "There is no such model or version.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body's Content-Encoding is neither gzip nor deflate.",
    500: "The run failed, or the input has ended three workers.",
    503: "The queue is full, no worker serves now, or the server ends. Ask again after Retry-After.",
    504: "The deadline passed.",
}
_HEADERS = {
    "Inference-Header-Content-Length": "Bytes of JSON; tensors as bytes follow, in the order of the JSON. "
    "0: there is nothing but the bytes of the model's only input.",
    "Content-Encoding": "gzip or deflate.",
    "Accept-Encoding": "gzip or deflate alone: the answer is compressed.",
    "X-Request-Id": "A name for the request, which the answer and the server's log have; else one is made.",
}


_ERROR = {"$ref": "#/components/responses/error"}


class Operation:
    """What an address does.

    Args:
        summary: Of it, in a sentence.
        function: Takes the address's names, and what the body says by keyword.
        gives: The type of what it answers in JSON, or a media type, where its annotation does not say it.
        by_user: Whether it takes the user of the client before the names.

    Attributes:
        takes: The type of bodies; None if it takes none.
    """

    def __init__(
        self,
        summary: str,
        function: Callable[..., Any],
        gives: Any = None,
        *,
        by_user: bool = False,
    ) -> None:
        self.summary, self.function, self.by_user = summary, function, by_user
        self.takes = document_of(function)
        self.gives = gives or get_type_hints(function)["return"]


Operations = Mapping[tuple[str, str], Operation]
"""By method and path; names in a path are ``{name}``."""


def description(operations: Operations, *, keys: bool) -> dict[str, Any]:
    """The document; `keys` is whether clients must show one."""
    takes = {each.takes.__name__: each.takes for each in operations.values() if each.takes}
    gives = [each.gives for each in operations.values() if not isinstance(each.gives, str)]
    types = [*takes.values(), *gives, Error, InferDocument]
    _, schemas = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in operations.items():
        given, kind = operation.gives, operation.takes
        found: dict[str, Any] = {
            "summary": operation.summary,
            "responses": {"200": _answer(given), "4XX": _ERROR, "5XX": _ERROR},
        }
        if path.endswith(("/live", "/ready")):
            found["responses"]["503"] = {**_answer(given), "description": "Not now."}
        if names := re.findall(r"{(\w+)}", path):
            found["parameters"] = [_parameter(name, "path") for name in names]
        if kind is not None:
            needed = any(field.required for field in msgspec.structs.fields(kind))
            found["requestBody"] = {"required": needed, "content": _json(kind)}
        if path.endswith("/infer"):
            found |= _infer(given, found["parameters"])
        if path.startswith("/v2/health/"):
            found["security"] = []
        paths.setdefault(path, {})[method.lower()] = found
    schemes = {name: {"type": "http", "scheme": name} for name in ("bearer", "basic")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mcinfer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"error": {"description": "What is wrong.", "content": _json(Error)}},
            "securitySchemes": schemes,
        },
        "security": [{name: []} for name in schemes] if keys else [],
    }


def _json(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_SCHEMAS)
    return {"application/json": {"schema": schema}}


def _answer(given: Any) -> dict[str, Any]:
    content = {given: {"schema": _TEXT}} if isinstance(given, str) else _json(given)
    return {"description": "Done.", "content": content}


def _parameter(name: str, place: str, text: str = "") -> dict[str, Any]:
    about = {"name": name, "in": place, "required": place == "path"}
    return {**about, "description": text, "schema": _TEXT}


def _infer(given: Any, names: list[Any]) -> dict[str, Any]:
    """What is of requests for outputs alone: tensors as bytes after the JSON, and a text for each failure."""
    as_bytes: dict[str, Any] = {"application/octet-stream": {}}
    given_back = ("Inference-Header-Content-Length", "X-Request-Id")
    headers = {name: {"schema": _TEXT} for name in given_back}
    answer = {"description": "The outputs.", "headers": headers}
    content = _json(Error)
    errors = {f"{n}": {"description": t, "content": content} for n, t in _INFER_ERRORS.items()}
    return {
        "parameters": names + [_parameter(name, "header", _HEADERS[name]) for name in _HEADERS],
        "requestBody": {"required": True, "content": {**_json(InferDocument), **as_bytes}},
        "responses": {
            "200": {**answer, "content": {**_json(given), **as_bytes}},
            **errors,
            "4XX": _ERROR,
        },
    }
