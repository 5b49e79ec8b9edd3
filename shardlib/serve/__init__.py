"""Serving of models: requests share programs, pages and prefixes. No network but in `http/`.

    engine = serving.Engine(init, forward, weights=state.params)
    engine.generate([[5, 2, 7]], most=16)

artefacts.py    a single pass as files that programs without shardlib run
cache.py        the paged cache of keys and values, and its forms on devices
checks.py       verification of served programs by the real compilers
commands.py     `shardlib plan --serve | generate | export | serve | bench-serve | edge`
computing.py    computation of an engine's steps: adapters, drafts, models with own caches
cost.py         seconds and bytes of serving
edge.py         a plan for a chain of unlike devices: its programs, and their run
edge_plan.py    plans for inference over a chain of unlike devices
engine.py       requests in, tokens out
folders.py      models, adapters and tokenizers in folders of Hugging Face
frontend.py     `plan_serving` and `plan_edge`
grammars.py     compiles forms of answers, and says which tokens may come next
hosting.py      models that answer many clients at once
http/           OpenAI's interface to an engine
layers.py       the program of one token over a cache, from a traced forward pass
loading.py      runs of `shardlib train`, models by name, and the demonstration
measuring.py    replays of a stored workload against a server
plan.py         the serving plan, and its text
program.py      the program of many tokens, of any requests
propagation.py  shardings of a served model
rendering.py    renders templates of conversations
requests.py     requests, their sampling, their forms and their capacity
sampling.py     the next token of each row, from logits
scheduling.py   the order of requests, and the pages of their keys and values
search.py       the best serving plan under the limits, and the curve of the best plans
served.py       a model with its tokenizer and name
space.py        the choices of a serving plan, priced
step.py         the compiled program of a step
tokenizing.py   reads a `tokenizer.json`, and encodes texts with it
triton/         a repository for Triton's inference server
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.serving")  # pyright: ignore
