"""Small programs of many kinds, on any mesh of up to eight devices, under any rules: made by a
chooser, at random or by a property test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import shardlib
from tests.zoo.parity import capture, relative_errors

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

ROWS, LENGTH = 16, 8
#: How a layer uses its weight [in, out]; the last ones need as many columns as rows.
FORMS = (
    "plain",
    "stored transposed",
    "scaled",
    "bias",
    "einsum",
    "checkpoint",
    "custom derivative",
    "attention",
    "convolution",
    "low rank",
    "tied",
    "scan",
)
MESHES = tuple(
    (data, fsdp, tensor)
    for data in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    for tensor in (1, 2, 4, 8)
    if 2 <= data * fsdp * tensor <= 8
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program on one mesh.

    Attributes:
        layers: form and width of every layer.
        mesh: sizes of data, fsdp and tensor.
        zero: what is stored sharded over fsdp.
        rules: the names of dims that are sharded over tensor, in order.
        late: whether the rule for the batch comes last.
        topology: whose plan it is; it runs on simulated devices in any case.
    """

    layers: tuple[tuple[str, int], ...]
    mesh: tuple[int, int, int]
    zero: int
    rules: tuple[str, ...]
    late: bool
    topology: str

    def pin(self) -> dict[str, Any]:
        """The decisions, all by hand."""
        rules: list[list[Any]] = [[name, "tensor"] for name in self.rules]
        rules.insert(len(rules) if self.late else 0, ["batch", ["data", "fsdp"]])
        return {
            "mesh": dict(zip(("data", "fsdp", "tensor"), self.mesh, strict=True)),
            "zero": self.zero,
            "remat": "none",
            "microbatches": 1,
            "rules": rules,
        }


def case(choose: Choose[Any]) -> Case:
    """A case, all of whose choices another one makes."""
    layers: list[tuple[str, int]] = []
    width = 16
    for _ in range(choose((1, 2, 3))):
        form = choose(FORMS)
        same = form in ("attention", "tied", "scan")
        width = width if same else choose((16, 16, 32))
        layers.append((form, width))
    mesh = choose(MESHES)
    devices = mesh[0] * mesh[1] * mesh[2]
    names = [f"h{number}" for number in range(len(layers) + 1)]
    rules = [names.pop(choose(range(len(names)))) for _ in range(choose(range(1, len(names) + 1)))]
    return Case(
        layers=tuple(layers),
        mesh=mesh,
        zero=choose((3, 3, 2, 1)) if mesh[1] > 1 else 0,
        rules=tuple(rules),
        late=choose((True, False)),
        topology=f"{choose(('cpu', 'cpu', 'h100'))}:{devices}",
    )


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """A matmul with a derivative of its own."""
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, back: (back @ saved[1].T, jnp.einsum("bti,bto->io", saved[0], back)),
)


def _weights(case: Case) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[str | None, ...]]]:
    """Shapes and names of all weights; dim `h<k>` is the width before layer k."""
    shapes: dict[str, tuple[int, ...]] = {"head": (case.layers[-1][1], 4)}
    axes: dict[str, tuple[str | None, ...]] = {"head": (f"h{len(case.layers)}", "classes")}
    before = 16
    for number, (form, width) in enumerate(case.layers):
        ins, outs, name = f"h{number}", f"h{number + 1}", f"w{number}"
        shapes[name], axes[name] = (before, width), (ins, outs)
        if form == "stored transposed":
            shapes[name], axes[name] = (width, before), (outs, ins)
        elif form == "scaled":
            shapes[f"s{number}"], axes[f"s{number}"] = (width,), (outs,)
        elif form == "bias":
            shapes[f"b{number}"], axes[f"b{number}"] = (width,), (outs,)
        elif form == "einsum":
            shapes[name], axes[name] = (before, 4, width // 4), (ins, "heads", outs)
        elif form == "convolution":
            shapes[name], axes[name] = (3, before, width), ("window", ins, outs)
        elif form == "low rank":
            shapes[f"a{number}"], axes[f"a{number}"] = (before, 8), (ins, "rank")
            shapes[f"b{number}"], axes[f"b{number}"] = (8, width), ("rank", outs)
        elif form == "scan":
            shapes[name], axes[name] = (3, width, width), ("layers", ins, outs)
        before = width
    return shapes, axes


def _layer(form: str, number: int, x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    w = params[f"w{number}"]
    if form == "stored transposed":
        return x @ w.T
    if form == "scaled":
        return x @ (w * params[f"s{number}"])
    if form == "bias":
        return x @ w + params[f"b{number}"]
    if form == "einsum":
        return jnp.einsum("bti,ijk->btjk", x, w).reshape(*x.shape[:2], -1)
    if form == "checkpoint":
        return jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    if form == "custom derivative":
        return product(x, w)
    if form == "attention":
        query = x @ w
        return jax.nn.softmax(jnp.einsum("bqi,bki->bqk", query, x) / 4) @ x
    if form == "convolution":
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
    if form == "low rank":
        return x @ (w + params[f"a{number}"] @ params[f"b{number}"])
    if form == "tied":
        return jnp.tanh(x @ w) @ w.T
    if form == "scan":
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    return x @ w


def errors(case: Case) -> dict[str, float]:
    """Errors of loss and gradients against JAX on one device, relative to the largest element of
    each.
    """
    shapes, axes = _weights(case)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {
            name: jax.random.normal(own, shape) / 4
            for own, (name, shape) in zip(
                jax.random.split(key, len(shapes)), shapes.items(), strict=True
            )
        }

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for number, (form, _) in enumerate(case.layers):
            x = jnp.tanh(_layer(form, number, x, params))
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    random = np.random.default_rng(0)
    batch = {
        "x": random.standard_normal((ROWS, LENGTH, 16)).astype(np.float32),
        "y": random.standard_normal((ROWS, LENGTH, 4)).astype(np.float32),
    }
    program = shardlib.compile(
        shardlib.tree(init, axes), loss, capture(), batch, topology=case.topology, pin=case.pin()
    )
    return relative_errors(program, loss, batch)
