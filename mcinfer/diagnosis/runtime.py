"""What ONNX Runtime is installed, asked in a process that ends with the answer.

Whoever imports a runtime keeps it, its threads and its memory, for as long as he runs.
"""

import json
import subprocess
import sys
from dataclasses import dataclass

from mcinfer.errors import EngineError
from mcinfer.process import environment, import_path

_SECONDS = 60.0
_ASK = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import onnxruntime
print(json.dumps([onnxruntime.__version__, onnxruntime.get_available_providers()]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """ONNX Runtime as it is installed.

    Attributes:
        version: Its own word.
        providers: That it was built with, and so offers; what they need may be missing all the same.
    """

    version: str
    providers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.version} offers: {', '.join(self.providers)}"

    @property
    def has_cuda(self) -> bool:
        """Whether it can run anything on GPUs."""
        return "CUDAExecutionProvider" in self.providers

    @property
    def without_cuda(self) -> str:
        """What to say where there are GPUs, and it cannot."""
        return f"onnxruntime {self.version} has no CUDAExecutionProvider: it runs nothing on them"


def installed_runtime() -> Runtime:
    """Import it in a child, and ask.

    Raises:
        EngineError: It cannot be imported: why, in its own last line.
    """
    path = json.dumps(import_path())
    try:
        ran = subprocess.run(  # noqa: S603 nothing in it comes from outside
            [sys.executable, "-P", "-c", _ASK, path],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise EngineError(f"onnxruntime was not imported in {_SECONDS:g} s") from exc
    except OSError as exc:
        raise EngineError(f"no process can be started to import onnxruntime: {exc}") from exc
    try:
        version, providers = json.loads(ran.stdout)
    except ValueError:
        words = ran.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(words) if line.strip()), f"status {ran.returncode}")
        raise EngineError(f"onnxruntime cannot be imported: {last.strip()}") from None
    return Runtime(version=version, providers=tuple(providers))
