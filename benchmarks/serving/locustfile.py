"""A server of `shardlib serve` under Locust, which must be installed apart:

locust -f benchmarks/serving/locustfile.py --headless -u 16 -r 4 -t 30s -H http://127.0.0.1:8000
"""

from __future__ import annotations

import random

from locust import HttpUser, between, task


class Reader(HttpUser):
    """Asks, reads, and thinks for a moment."""

    wait_time = between(0.1, 0.5)

    @task
    def complete(self) -> None:
        """One completion; a server that is full is not a failure of it."""
        body = {
            "prompt": f"value_{random.randrange(1000)} = ",
            "max_tokens": 32,
            "ignore_eos": True,
        }
        with self.client.post("/v1/completions", json=body, catch_response=True) as answer:
            if answer.status_code == 429 and "retry-after" in answer.headers:
                answer.success()
            elif answer.ok and answer.json()["usage"]["completion_tokens"] != 32:
                answer.failure("the answer is not whole")
