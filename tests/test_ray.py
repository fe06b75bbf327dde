"""`mcinfer.ray` without Ray. The tests with it are in tests/ray: `make test-ray`."""

import importlib
import re
import sys

import pytest

from mcinfer import MissingDependencyError


def test_missing_ray_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mcinfer.ray", raising=False)
    words = "mcinfer.ray needs the package ray: pip install 'mcinfer[ray]'"
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(words)}$"):
        importlib.import_module("mcinfer.ray")
