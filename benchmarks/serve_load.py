"""What clients of `benchmarks/serve.py` do, for locust (https://locust.io): one request after another."""

import os
from pathlib import Path

from locust import FastHttpUser, constant, task

BODY = Path(os.environ["SERVE_BODY"]).read_bytes()
HEAD_BYTES = os.environ["SERVE_HEAD_BYTES"]


class Client(FastHttpUser):  # type: ignore[misc] # nothing is known of its types
    """Sends the same binary request again and again."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def infer(self) -> None:
        headers = {"Inference-Header-Content-Length": HEAD_BYTES}
        self.client.post("/v2/models/model/infer", data=BODY, headers=headers)
