"""How a model is served on a machine that need not be here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import jax

from shardlib.annotation.model import Model
from shardlib.annotation.read import Init, read
from shardlib.annotation.trees.paths import path_text
from shardlib.cost.serving.cuts import cuts
from shardlib.cost.serving.reading_graph import served_model
from shardlib.cost.serving.served_model import Attending, ServedModel
from shardlib.frontend.machines import machine_of
from shardlib.hardware.topology import TopologyLike
from shardlib.lowering.serving.calls import CachedCall
from shardlib.lowering.serving.program import Forward, traced_forward
from shardlib.planning.serving.pins import ServingPin, ServingPins
from shardlib.planning.serving.planner import plan_served
from shardlib.planning.serving.serving_plan import ServingPlan
from shardlib.planning.serving.space import Asked
from shardlib.planning.serving.workload import ServingWorkload
from shardlib.tracing.forward_only import served_problem
from shardlib.tracing.jaxpr_to_graph import graph_from_program


def plan_serving(
    init: Init,
    forward: Forward,
    *,
    topology: TopologyLike | None = None,
    prompt: int = 2048,
    output: int = 256,
    rate: float | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    objective: str = "throughput",
    weights: str = "bf16",
    cache: str = "bf16",
    pin: Mapping[str, ServingPin] | None = None,
    name: str | None = None,
) -> ServingPlan:
    """Finds how a model is served best, without touching any device.

    Args:
        init: what makes the model, as `shardlib.compile` takes it.
        forward: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab]; attention by
            `shardlib.attention`.
        topology: "v5e:4x4", "h100:8", a topology file, ...; by default all devices of this machine.
        prompt: tokens of a prompt, on average.
        output: tokens of an answer, on average.
        rate: requests a second; None for as many as there is room for.
        ttft: seconds to the first token at most.
        tpot: seconds from token to token at most.
        objective: "throughput" for the most tokens a second and chip, which with a `rate` are the
            fewest chips; "latency" for the fewest seconds from token to token.
        weights: how they are stored: "bf16", "int8", "fp8", or "model" for as the model has them.
        cache: how keys and values are stored, the same words.
        pin: decisions fixed by hand: "mesh" ({"tensor": 8}), "replicas", "batch", "chunk", "page".
        name: what to call the model; by default that of its constructor or class.

    Returns:
        The plan; it can be asked on (`pareto`, `why_not`, `replan`, `two_meshes`).

    Raises:
        ArgumentError: lengths, limits or words that ask for nothing.
        AnnotationError: `init` is nothing that can be read, or names do not fit its arrays.
        ModelError: the model cannot be served with a cache.
        TopologyError: the topology does not parse, or none is given and here are accelerators.
        PinError: a pin is misspelt or out of range, or the pins leave no choice.
        InfeasibleError: the model does not fit, or nothing keeps to the limits.
    """
    load = ServingWorkload(
        prompt=prompt,
        output=output,
        rate=rate,
        ttft=ttft,
        tpot=tpot,
        objective=objective,
        weights=weights,
        cache=cache,
    )
    pins, machine = ServingPins.parse(pin), machine_of(topology)
    model = read(init)
    if name is not None:
        model = replace(model, name=name)
    served = traced_served(model, forward, longest=load.tokens)
    return plan_served(
        Asked(
            model=served,
            cut=cuts(served),
            topology=machine,
            workload=load,
            pins=pins,
            problem=served_problem(model, forward, longest=load.tokens),
        )
    )


def traced_served(model: Model, forward: Forward, *, longest: int) -> ServedModel:
    """What the forward pass of one token reads, computes and keeps."""
    traced = traced_forward(model, forward, longest=max(2, longest))
    inputs = [
        (path_text(path), role)
        for tree, role in ((model.params, "parameter"), (model.state, "state"))
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return served_model(
        graph_from_program(traced.program, [*inputs, ("tokens", "batch")]),
        [one for call in traced.calls for one in _attending(call)],
        name=model.name,
        vocab=traced.vocab,
    )


def _attending(call: CachedCall) -> list[Attending]:
    """The layers of a call, by how many tokens they keep."""
    return [
        Attending(
            layers=call.windows.count(window),
            heads=call.heads,
            width=call.width,
            kept=tuple((math.prod(one.shape[-1:]), math.prod(one.shape[:-1])) for one in call.kept),
            dtype=str(call.kept[0].dtype),
            window=window,
        )
        for window in sorted({*call.windows})
    ]
