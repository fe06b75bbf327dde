"""What an entry of the cache holds where it is a prepared model, or the reason why there is none."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODEL_FILE = "model.onnx"
"""The optimised graph; its packed weights lie beside it."""

ABOUT_FILE = "about.json"
"""``name`` of the model, ``bytes`` of its files, ``seconds`` that preparing took."""

FAILURE_FILE = "failure.txt"
"""In the place of a model: the runtime's words why it cannot be prepared."""

Progress = Callable[[Mapping[str, Any]], None]
"""Called as long as preparing a model gets on, with ``seconds`` so far, ``written`` bytes, and ``bytes`` of
the model."""


def about(entry: Path) -> Mapping[str, Any]:
    """What an entry says of its model; nothing where it is damaged, or removed meanwhile."""
    try:
        content = json.loads((entry / ABOUT_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
