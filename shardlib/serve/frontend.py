"""`plan_serving` and `plan_edge`: plans for serving a model on a machine that need not be here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from shardlib.annotation.model import Init, read
from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree, path_text
from shardlib.frontend.choice import machine_of
from shardlib.frontend.model import problem
from shardlib.machines.topology import Device, TopologyLike, cluster
from shardlib.serve.cost import AttentionLayers, ServedModel, cuts, served_model
from shardlib.serve.edge_plan import EdgePlan
from shardlib.serve.edge_plan import plan_edge as spread
from shardlib.serve.layers import CachedCall
from shardlib.serve.plan import ServingPlan
from shardlib.serve.program import Forward, traced_forward
from shardlib.serve.search import plan_served
from shardlib.serve.space import ServingPin, ServingPins, ServingProblem, ServingWorkload
from shardlib.tracing.trace import graph_from_program, served_problem


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
        ServingProblem(
            model=served,
            cut=cuts(served),
            topology=machine,
            workload=load,
            pins=pins,
            problem=served_problem(model, forward, longest=load.tokens),
        )
    )


def traced_served(model: Model, forward: Forward, *, longest: int) -> ServedModel:
    """Returns what the forward pass of one token reads, computes and keeps."""
    traced = traced_forward(model, forward, longest=max(2, longest))
    inputs = [
        (path_text(path), role)
        for tree, role in ((model.params, "parameter"), (model.state, "state"))
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return served_model(
        graph_from_program(traced.program, [*inputs, ("tokens", "batch")]),
        [layers for call in traced.calls for layers in _attending(call)],
        name=model.name,
        vocab=traced.vocab,
    )


def _attending(call: CachedCall) -> list[AttentionLayers]:
    """The layers of a call, by how many tokens they keep."""
    return [
        AttentionLayers(
            layers=call.windows.count(window),
            heads=call.heads,
            width=call.width,
            kept=tuple(
                (math.prod(array.shape[-1:]), math.prod(array.shape[:-1])) for array in call.kept
            ),
            dtype=str(call.kept[0].dtype),
            window=window,
        )
        for window in sorted({*call.windows})
    ]


def plan_edge(
    init: Init,
    forward: Callable[[Tree, Tree], Tree],
    batch: Tree,
    *,
    devices: str | Path | Sequence[Device],
    batch_axes: Tree = None,
    name: str | None = None,
) -> EdgePlan:
    """Spreads a model over a chain of unlike devices for inference: runs of layers, in the order
    and on the devices with the highest throughput.

    Args:
        init: a model, see `shardlib.plan`; so all that says no more here.
        forward: (model, batch) -> any arrays: what inference computes.
        batch: one batch as it goes through the devices, arrays or `jax.ShapeDtypeStruct`.
        devices: path of a TOML file, see `shardlib.machines.topology`, or the devices themselves.
        batch_axes: logical axes of the batch.
        name: what to call the model.

    Returns:
        The plan: a stage for every device that is used, with its pieces of the model, seconds and
        bytes.

    Raises:
        AnnotationError: `init` is nothing that can be read, or names do not fit its arrays.
        TracingError: `forward` cannot be traced, or the model has no layers that repeat.
        TopologyError: the file of devices is not usable.
        MissingFileError: the file of devices is not there.
        InfeasibleError: the devices do not hold the model; the message says how many bytes are
            lacking.
    """
    listed = cluster(devices)

    def run(model: Tree, batch: Tree) -> Tree:
        return jnp.zeros(()), {"results": forward(model, batch)}

    return spread(
        problem(init, run, optax.identity(), batch, batch_axes=batch_axes, name=name, rows="mean"),
        listed,
    )
