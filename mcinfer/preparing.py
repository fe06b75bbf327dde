"""The child that prepares a model: `python -m mcinfer.preparing`; see `mcinfer.prepared.child`.

Tasks: ``fill``, write a prepared model into a folder; ``ensure``, see to it that the cache has one, for
parents that import no engine.
"""

import json
import os
import sys
import threading
from typing import Any


def main() -> int:
    """Do one task; the exit status."""
    # What a runtime prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    task = json.loads(line)
    threading.Thread(target=_end_with_parent, name="mcinfer-watch-parent", daemon=True).start()
    sys.path[:] = task["path"]
    from mcinfer.engines.preparation import ensure, fill
    from mcinfer.errors import McinferError

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        if task["task"] == "fill":
            fill(task["engine"], task["request"], task["folder"])
            answer({"done": True})
        else:
            key = ensure(task["engine"], task["request"], lambda tick: answer({"progress": tick}))
            answer({"key": key})
    except McinferError as exc:
        answer({"error": str(exc)})
    return 0


def _end_with_parent() -> None:
    """The standard input ends with the parent: nobody wants this work any more."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
