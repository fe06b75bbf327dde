"""The child that prepares a model: `python -m mcinfer.preparing FD`; see `mcinfer.model_cache.child`.

Tasks: ``fill``, write a prepared model into a folder; ``ensure``, see to it that the cache has one, for
parents that import no engine.
"""

import json
import socket
import sys
from typing import Any

from mcinfer.process import ORPHANED, watch_parent


def main() -> int:
    """Do one task; the exit status."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    with channel, channel.makefile("rw", encoding="utf-8") as lines:
        line = lines.readline()
        if not line:
            return ORPHANED
        task = json.loads(line)
        watch_parent(task["parent"], channel.fileno())
        sys.path[:] = task["path"]
        from mcinfer.engines.preparation import ensure, fill
        from mcinfer.errors import McinferError
        from mcinfer.model_cache.texts import shortened

        def answer(content: dict[str, Any]) -> None:
            print(json.dumps(content), file=lines, flush=True)

        try:
            if task["task"] == "fill":
                fill(task["engine"], task["request"], task["folder"], task["most_file_bytes"])
                answer({"done": True})
            else:
                key = ensure(
                    task["engine"], task["request"], lambda tick: answer({"progress": tick})
                )
                answer({"key": key})
        except McinferError as exc:
            answer({"error": shortened(str(exc))})
    return 0


if __name__ == "__main__":
    sys.exit(main())
