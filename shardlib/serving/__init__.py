"""Models that answer: requests share programs, pages and prefixes. No network in here.

    engine = serving.Engine(init, forward, weights=state.params)
    engine.generate([[5, 2, 7]], most=16)

capacity.py   how many requests and tokens are served
requests.py   a request: prompt, settings, what it has so far
prefixes.py   what a page holds, as a digest of all tokens up to its end
pool.py       pages of the cache: free, in use, kept for their prefix
schedule.py   which tokens the next step computes
sampling.py   the next token of each row, from logits
step.py       the compiled programs of a step
weights.py    where weights and pages live
compared.py   logits with a cache beside those of the forward pass itself
engine.py     all of it: requests in, tokens out
trained.py    a run of `shardlib train`, as it is served
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.serving.capacity import Capacity
    from shardlib.serving.engine import Engine, Event
    from shardlib.serving.requests import Asked, Request, Sampling

_HOME = {
    "Asked": "shardlib.serving.requests",
    "Capacity": "shardlib.serving.capacity",
    "Engine": "shardlib.serving.engine",
    "Event": "shardlib.serving.engine",
    "Request": "shardlib.serving.requests",
    "Sampling": "shardlib.serving.requests",
}

__all__ = ["Asked", "Capacity", "Engine", "Event", "Request", "Sampling"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib.serving' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
