"""Small problems for the planner: traced from plain JAX functions, no model library involved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.graph import InputDim, Parameter, Problem, StepGraph
from shardlib.machines.topology import Topology
from shardlib.planner import search as planner
from shardlib.planner.plan import Plan
from shardlib.planner.workload import Workload, prepare
from shardlib.tracing.trace import graph_from_jaxpr

Axes = Mapping[str, tuple[str | None, ...]]


def problem(
    loss: Callable[..., Any],
    params: dict[str, Any],
    batch: dict[str, Any],
    axes: Axes,
    batch_axes: Axes,
    *,
    remat: Mapping[str, Callable[..., Any]],
) -> Problem:
    """A problem whose step graphs are value-and-gradient of `loss` and of its remat variants."""
    flat = [*params.values(), *batch.values()]
    inputs = [(name, "parameter") for name in params] + [(name, "batch") for name in batch]

    def pack(fn: Callable[..., Any], *leaves: Any) -> Any:
        return fn(
            dict(zip(params, leaves, strict=False)),
            dict(zip(batch, leaves[len(params) :], strict=True)),
        )

    def step(fn: Callable[..., Any]) -> StepGraph:
        closed = jax.make_jaxpr(
            lambda *leaves: jax.value_and_grad(
                lambda *p: pack(fn, *p, *leaves[len(params) :]), argnums=range(len(params))
            )(*leaves[: len(params)])
        )(*flat)
        graph = graph_from_jaxpr(closed, inputs)
        return StepGraph(
            graph=graph,
            inputs=tuple(InputDim(paths=(name,)) for name, _ in inputs),
            gradients=graph.outputs[1:],
        )

    return Problem(
        model="world",
        forward=graph_from_jaxpr(
            jax.make_jaxpr(lambda *leaves: pack(loss, *leaves))(*flat), inputs
        ),
        steps={"none": step(loss), **{name: step(fn) for name, fn in remat.items()}},
        parameters=tuple(
            Parameter(
                path=name,
                shape=value.shape,
                dtype=str(value.dtype),
                axes=axes.get(name, (None,) * value.ndim),
                state_bytes_per_element=8.0,
            )
            for name, value in params.items()
        ),
        batch=tuple(
            (name, value.shape, str(value.dtype), batch_axes.get(name, (None,) * value.ndim))
            for name, value in batch.items()
        ),
        tokens=next(iter(batch.values())).size,
        compute_dtype="float32",
    )


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def mlp(batch: int = 16, embed: int = 32, hidden: int = 64, *, named: bool = True) -> Problem:
    """Two matmuls with a relu and biases."""

    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        return jnp.mean((jax.nn.relu(b["x"] @ p["up"] + p["bias"]) @ p["down"] - b["x"]) ** 2)

    params = {"up": shape(embed, hidden), "bias": shape(hidden), "down": shape(hidden, embed)}
    axes: Axes = (
        {"up": ("embed", "mlp"), "bias": ("mlp",), "down": ("mlp", "embed")} if named else {}
    )
    return problem(loss, params, {"x": shape(batch, embed)}, axes, {"x": ("batch", None)}, remat={})


def layers(
    batch: int = 16,
    seq: int = 32,
    embed: int = 64,
    hidden: int = 256,
    heads: int = 4,
    vocab: int = 128,
    depth: int = 4,
) -> Problem:
    """A decoder with attention and a gated MLP under a scan, embedding and head, with full remat as
    a variant.
    """
    width = embed // heads

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def block(x: Any, p: Any) -> Any:
        y = norm(x)
        q, k, v = (jnp.einsum("bse,ehd->bshd", y, p[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / width**0.5)
        x = x + jnp.einsum("bhst,bthd,hde->bse", scores, v, p["o"])
        y = norm(x)
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss_with(body: Any) -> Any:
        def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
            x = p["table"][b["tokens"]]
            x, _ = jax.lax.scan(
                body, x, {name: value for name, value in p.items() if name not in ("table", "head")}
            )
            logits = x @ p["head"]
            hot = jax.nn.one_hot(b["tokens"], vocab)
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1))

        return loss

    params = {
        "table": shape(vocab, embed),
        "head": shape(embed, vocab),
        "gate": shape(depth, embed, hidden),
        "up": shape(depth, embed, hidden),
        "down": shape(depth, hidden, embed),
        **{name: shape(depth, embed, heads, width) for name in "qkv"},
        "o": shape(depth, heads, width, embed),
    }
    axes: Axes = {
        "table": ("vocab", "embed"),
        "head": ("embed", "vocab"),
        "gate": ("layers", "embed", "mlp"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        **dict.fromkeys("qkv", ("layers", "embed", "heads", "head_dim")),
        "o": ("layers", "heads", "head_dim", "embed"),
    }
    return problem(
        loss_with(block),
        params,
        {"tokens": shape(batch, seq, dtype=jnp.int32)},
        axes,
        {"tokens": ("batch", "seq")},
        remat={"full": loss_with(jax.checkpoint(block))},
    )


def stack(
    batch: int = 4, seq: int = 512, embed: int = 2048, hidden: int = 8192, depth: int = 4
) -> Problem:
    """Gated layers under a scan that mix the sequence by a fixed matrix, with full remat as a
    variant: few colours, every axis but experts.
    """

    def block(x: Any, p: Any) -> Any:
        mixed = jnp.einsum("st,bte->bse", jnp.exp(-jnp.arange(seq)[:, None] * jnp.arange(seq)), x)
        return x + (jax.nn.silu(mixed @ p["up"])) @ p["down"], None

    def loss_with(body: Any) -> Any:
        return lambda p, b: jnp.mean((jax.lax.scan(body, b["x"], p)[0] - b["x"]) ** 2)

    params = {"up": shape(depth, embed, hidden), "down": shape(depth, hidden, embed)}
    axes: Axes = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
    return problem(
        loss_with(block),
        params,
        {"x": shape(batch, seq, embed)},
        axes,
        {"x": ("batch", "seq", None)},
        remat={"full": loss_with(jax.checkpoint(block))},
    )


def experts(
    batch: int = 4,
    seq: int = 512,
    embed: int = 1024,
    hidden: int = 4096,
    count: int = 4,
    depth: int = 2,
) -> Problem:
    """Layers of experts, top-1 routed with a sort and grouped matmuls, under a scan."""

    def block(x: Any, p: Any) -> Any:
        tokens = x.reshape(-1, embed)
        chosen = jnp.argmax(tokens @ p["router"], axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
        rows = jnp.take(tokens, order, axis=0, mode="clip")
        out = jax.lax.ragged_dot(
            jax.nn.relu(jax.lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes
        )
        return x + jnp.take(out, jnp.argsort(order), axis=0, mode="clip").reshape(x.shape), None

    def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
        return jnp.mean((jax.lax.scan(block, b["x"], p)[0] - b["x"]) ** 2)

    params = {
        "router": shape(depth, embed, count),
        "up": shape(depth, count, embed, hidden),
        "down": shape(depth, count, hidden, embed),
    }
    axes: Axes = {
        "router": ("layers", "embed", "expert"),
        "up": ("layers", "expert", "embed", "mlp"),
        "down": ("layers", "expert", "mlp", "embed"),
    }
    made = problem(
        loss, params, {"x": shape(batch, seq, embed)}, axes, {"x": ("batch", "seq", None)}, remat={}
    )
    return replace(made, functions=frozenset({"dropless"}))


def two_stacks(
    batch: int = 4,
    seq: int = 64,
    embed: int = 256,
    hidden: tuple[int, int] = (512, 2048),
    depth: tuple[int, int] = (2, 3),
) -> Problem:
    """Two stacks of unlike layers, each under a scan of its own: wide ones with a softmax over the
    sequence, and gated ones; two remat policies as variants.
    """

    def mixing(x: Any, p: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bse,bte->bst", x, x) / embed**0.5)
        return x + jax.nn.relu(jnp.einsum("bst,bte->bse", scores, x) @ p["up"]) @ p["down"], None

    def gated(x: Any, p: Any) -> Any:
        return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"], None

    def loss_with(wrap: Callable[..., Any]) -> Any:
        def loss(p: dict[str, Any], b: dict[str, Any]) -> Any:
            x = b["x"]
            for body, part in ((mixing, "first"), (gated, "second")):
                x, _ = jax.lax.scan(
                    wrap(body),
                    x,
                    {
                        name.removeprefix(f"{part}."): value
                        for name, value in p.items()
                        if name.startswith(f"{part}.")
                    },
                )
            return jnp.mean((x - b["x"]) ** 2)

        return loss

    (few, many), (one, two) = hidden, depth
    params = {
        "first.up": shape(one, embed, few),
        "first.down": shape(one, few, embed),
        **{f"second.{name}": shape(two, embed, many) for name in ("gate", "up")},
        "second.down": shape(two, many, embed),
    }
    axes: Axes = {
        name: ("layers", "mlp", "embed") if "down" in name else ("layers", "embed", "mlp")
        for name in params
    }
    dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return problem(
        loss_with(lambda body: body),
        params,
        {"x": shape(batch, seq, embed)},
        axes,
        {"x": ("batch", "seq", None)},
        remat={
            "full": loss_with(jax.checkpoint),
            "dots": loss_with(lambda body: jax.checkpoint(body, policy=dots)),
        },
    )


@functools.cache
def prepared(make: Callable[..., Problem], **sizes: int) -> Workload:
    """A world prepared for the search, once in a process."""
    return prepare(made(make, **sizes))


@functools.cache
def made(make: Callable[..., Problem], **sizes: int) -> Problem:
    """A world, traced once in a process."""
    return make(**sizes)


def workload() -> Workload:
    """The layers, prepared for any chips."""
    return prepared(layers)


def with_memory(where: Topology, size: float) -> Topology:
    """A machine whose devices have `size` bytes of memory."""
    return replace(where, chip=replace(where.chip, hbm_bytes=int(size), reserved_bytes=0))


_PLANS: dict[str, Plan] = {}


def planned(
    where: str | Topology, pin: dict[str, object] | None = None, load: Workload | None = None
) -> Plan:
    """The best plan of a world, else of the layers, searched for once in a process."""
    load = workload() if load is None else load
    machine = where if isinstance(where, str) else where.to_json()
    key = repr((machine, pin, id(load)))
    if key not in _PLANS:
        _PLANS[key] = planner.search(load.problem, where, pin, workload=load)
    return _PLANS[key]
