"""Models that answer: requests share programs, pages and prefixes. No network but in `http/`.

    engine = serving.Engine(init, forward, weights=state.params)
    engine.generate([[5, 2, 7]], most=16)

scheduling/   requests, pages, and which tokens the next step computes
sampling/     the next token of each row, from logits
computing/    a user's model as what computes steps
step.py       the compiled programs of a step
weights.py    where weights and pages live
compared.py   logits with a cache beside those of the forward pass itself
engine.py     all of it: requests in, tokens out
exporting.py  the program of a step, for the process that compiles it
verified.py   the same programs by the compilers of other machines
answers.py    whole answers, and streams of tokens
several.py    several models in one process
trained.py    a run of `shardlib train`, as it is served
folders/      folders of Hugging Face, as they are served
text.py       texts as tokens, and tokens as a text that grows
served.py     model, weights, tokenizer and name together
words.py      from a word to what is served: model, weights, tokenizer, name
hosting/      an engine for many clients at once: a thread, streams, texts
http/         OpenAI's interface to it
measuring/    how a server answers a stored workload
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlib.serve.engine import Engine, Models
    from shardlib.serve.folders import read_folder, spelt
    from shardlib.serve.loading import named
    from shardlib.serve.requests import (
        Asked,
        Capacity,
        Event,
        Form,
        Request,
        Sampling,
        Storage,
        Told,
    )
    from shardlib.serve.served import Served

_HOME = {
    "Asked": "shardlib.serve.requests",
    "Capacity": "shardlib.serve.requests",
    "Storage": "shardlib.serve.requests",
    "Engine": "shardlib.serve.engine",
    "Event": "shardlib.serve.requests",
    "Form": "shardlib.serve.requests",
    "Models": "shardlib.serve.engine",
    "Request": "shardlib.serve.requests",
    "Sampling": "shardlib.serve.requests",
    "Served": "shardlib.serve.served",
    "Told": "shardlib.serve.requests",
    "named": "shardlib.serve.loading",
    "read_folder": "shardlib.serve.folders",
    "spelt": "shardlib.serve.folders",
}

__all__ = [
    "Asked",
    "Capacity",
    "Engine",
    "Event",
    "Form",
    "Models",
    "Request",
    "Sampling",
    "Served",
    "Storage",
    "Told",
    "named",
    "read_folder",
    "spelt",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardlib.serving' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
