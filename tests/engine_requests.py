"""Requests to engines, as tests write them: fields of the request and options of the engine side by side."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from mcinfer.config import CoreShare, Device, EngineOptions
from mcinfer.engines.base import EngineRequest

_OF_REQUESTS = {field.name for field in fields(EngineRequest)}


def engine_request(
    model: str | Path, device: str | Device = "cpu:0", *, shared_cores: bool = False, **given: Any
) -> EngineRequest:
    """A request for one thread and a model as it is, unless these are given."""
    options = {name: value for name, value in given.items() if name not in _OF_REQUESTS}
    return EngineRequest(
        model=str(model),
        device=Device.parse(str(device)),
        options=EngineOptions(**{"threads": 1, "prepare": "never", **options}),
        share=CoreShare(shared=shared_cores),
        **{name: value for name, value in given.items() if name in _OF_REQUESTS},
    )
