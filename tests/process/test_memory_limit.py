"""A pool in a control group with a memory limit, as containers have."""

import subprocess
import sys
from pathlib import Path

from tests.process.control_groups import limited_group
from tests.process.models import FakeModel
from tests.process.scripts import PREAMBLE

MOST = 400 << 20

PROGRAM = """
from pathlib import Path
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
for limits in (mcinfer.Limits(worker_memory_bytes=1 << 32), mcinfer.Limits()):
    with mcinfer.Master(sys.argv[1], 1, engine="fake", verify="never", limits=limits) as master:
        print(master.submit(X).exception(timeout=40.0))
"""


def set_limit(group: Path) -> None:
    names = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
    found = next((path for path in names if path.exists()), None)
    if found is None:
        raise FileNotFoundError(f"{group} takes no limit")
    found.write_text(f"{MOST}", encoding="ascii")


def test_errors_of_memory_name_the_limit_of_the_container(fake_model: FakeModel) -> None:
    model = fake_model(run=f"allocate:{2 * MOST}")
    with limited_group("memory", set_limit) as group:
        command = [sys.executable, "-c", PREAMBLE + PROGRAM, str(model), str(group)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    died, failed = done.stdout.splitlines()
    killed = "killed by SIGKILL; the out-of-memory killer ended a process of this container"
    assert killed in died
    assert f"which may have {MOST} bytes of memory" in died
    assert "MemoryError: " in failed
    assert f"; its container (control group) may have {MOST} bytes in all" in failed
