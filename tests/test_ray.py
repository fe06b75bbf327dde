"""`mcinfer.ray` without Ray. The tests with it are in tests/ray: `make test-ray`."""

import subprocess
import sys


def test_missing_ray_is_named_with_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import mcinfer.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "mcinfer.errors.MissingDependencyError: mcinfer.ray needs the package ray: "
        "pip install 'mcinfer[ray]'"
    )
