"""For all tests: ONNX Runtime's telemetry, which is on from 1.29, stays off, in workers too."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
