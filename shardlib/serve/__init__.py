"""Models that answer: requests share programs, pages and prefixes. No network but in `http/`.

    engine = serving.Engine(init, forward, weights=state.params)
    engine.generate([[5, 2, 7]], most=16)

artefacts.py      what a model computes, as files that programs without shardlib run
cache.py          layers that keep the same tokens of a request
checks.py         are logits with a cache those of the forward pass itself?
commands.py       the commands of models that answer
computing.py      what computes the steps of an engine
cost.py           seconds and bytes of serving
demonstration.py  the run that is served where no model is named
edge.py           A plan for a chain of unlike devices, run
edge_cutting.py   A traced forward pass as a chain of pieces, and what crosses a cut between them
edge_plan.py      inference over a chain of unlike devices
engine.py         requests in, tokens out
folders.py        models that come in folders of Hugging Face
frontend.py       how a model is served on a machine that need not be here
grammars.py       compiles forms of answers, and says which tokens may come next
hosting.py        models that answer many clients at once
http/             openAI's interface to an engine
layers.py         programs that serve
loading.py        A run of `shardlib train`, as it is served
measuring.py      how a server answers a stored workload
plan.py           A plan that serves
program.py        the program of so many tokens, of any requests
propagation.py    how is a model sharded that serves?
rendering.py      renders templates of conversations
requests.py       A request
sampling.py       the next token of each row, from logits
scheduling.py     who is served next, and where keys and values go
search.py         the best choice under the limits, and the curve of those that nothing beats
served.py         what is served
space.py          what can be chosen
step.py           the compiled program of a step
tokenizing.py     reads a `tokenizer.json`, and encodes texts with it
triton/           A repository for Triton's inference server, with a model's programs and weights
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
