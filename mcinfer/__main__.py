"""``python -m mcinfer``: the same as the console script ``mcinfer``."""

import sys

from mcinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
