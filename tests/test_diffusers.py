"""mcinfer.diffusers without its packages; `make test-diffusers` tests it with them."""

import sys
from importlib import import_module

import pytest

from mcinfer import MissingDependencyError


@pytest.mark.parametrize("missing", ["diffusers", "torch"])
def test_missing_package_is_an_error_that_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mcinfer.diffusers", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not there
    with pytest.raises(MissingDependencyError, match=r"pip install '?diffusers"):
        import_module("mcinfer.diffusers")
