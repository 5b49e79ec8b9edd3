"""Every layer class of `flax.nnx` and `flax.linen`, with names on every array that an initialiser
makes, and five steps of it beside plain JAX.

Classes are found in the modules; what a constructor asks for is given by the name of its parameter.
A class that asks for something else has no recipe, and fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import shardlib
from shardlib.annotation.model import read

#: By the name of a parameter of a constructor, for both packages.
ARGUMENTS: dict[str, Any] = {
    "num_features": 8,
    "in_features": 8,
    "out_features": 16,
    "features": 16,
    "hidden_features": 16,
    "kernel_size": (3,),
    "num_heads": 2,
    "num_groups": 2,
    "num_embeddings": 16,
    "lora_rank": 4,
    "einsum_str": "abc,cd->abd",
    "kernel_shape": (8, 16),
    "shape": (8, 16),
    "rate": 0.0,
    "decode": False,
    "deterministic": True,
    "use_running_average": False,
}
#: Parameters with a default that the recipe sets all the same.
SET = ("num_groups", "decode", "einsum_str", "deterministic", "use_running_average")
#: Layers without a matrix, which follow one here, so that there is something to shard over tensor.
WITHOUT_MATRIX = ("Norm", "PReLU")
#: Fail in Flax itself where the layer inside has boxes that are taken off, or metadata.
UNNAMED = (nn.SpectralNorm, nn.WeightNorm, nnx.WeightNorm)
#: What other classes derive from.
BASES = ("Module", "RNNCellBase")
ROWS, STEPS = 8, 5


def layers(package: ModuleType) -> Iterator[tuple[str, type]]:
    """(name, class) of every layer of a package."""
    base = package.Module
    for name, kind in sorted(vars(package).items()):
        if inspect.isclass(kind) and issubclass(kind, base) and name not in BASES:
            yield name, kind


CASES = [f"{package.__name__}.{name}" for package in (nnx, nn) for name, _ in layers(package)]


class Layer:
    """One class: how it is built, with names or without, and its loss."""

    def __init__(self, case: str, names: Callable[[str], tuple[str, ...]] | None):
        package, _, self.name = case.rpartition(".")
        self.package = nnx if package == nnx.__name__ else nn
        self.kind, self.names = getattr(self.package, self.name), names
        if self.kind in UNNAMED:
            self.names = None

    @property
    def linen(self) -> bool:
        return self.package is nn

    def module(self, rngs: nnx.Rngs | None = None) -> Any:
        """The layer, ready to be called with the batch."""
        package, name = self.package, self.name
        dense = package.Dense if self.linen else package.Linear
        if name in ("SpectralNorm", "WeightNorm"):
            return self.made(self.kind, rngs, layer_instance=self.made(dense, rngs))
        if name.endswith(WITHOUT_MATRIX):
            size = {"features": 8} if self.linen else {"out_features": 8}
            parts = [self.made(dense, rngs, **size), self.made(self.kind, rngs)]
            return nn.Sequential(parts) if self.linen else nnx.Sequential(*parts)
        if name == "Fp8Einsum":
            return Fp8(self.kind)
        if "Fp8" in name:
            return self.made(nn.Dense, rngs, dot_general_cls=self.kind)
        if issubclass(self.kind, package.RNNCellBase):
            return package.RNN(self.made(self.kind, rngs), **self.streams(rngs))
        cell = package.SimpleCell
        if name == "RNN":
            return package.RNN(self.made(cell, rngs), **self.streams(rngs))
        if name == "Bidirectional":
            both = [package.RNN(self.made(cell, rngs), **self.streams(rngs)) for _ in range(2)]
            return package.Bidirectional(*both, **self.streams(rngs))
        if name == "Embed":  # a lookup, which shards nothing over tensor by itself
            size = {"features": 16} if self.linen else {"in_features": 16}
            parts = [self.made(self.kind, rngs), self.made(dense, rngs, **size)]
            return nn.Sequential(parts) if self.linen else nnx.Sequential(*parts)
        if name == "LoRA":  # which is zero at first
            return self.made(self.kind, rngs, base_module=self.made(dense, rngs))
        if name == "Sequential":
            parts = [self.made(dense, rngs), jnp.tanh]
            return nn.Sequential(parts) if self.linen else nnx.Sequential(*parts)
        if name == "List":
            return Applied(nnx.List([self.made(dense, rngs)]))
        if name == "Dict":
            return Applied(nnx.Dict(first=self.made(dense, rngs)))
        return self.made(self.kind, rngs)

    def streams(self, rngs: nnx.Rngs | None) -> dict[str, Any]:
        return {} if self.linen else {"rngs": rngs}

    def made(self, kind: type, rngs: nnx.Rngs | None, **more: Any) -> Any:
        given = dict(more)
        constructor = kind if self.linen else kind.__init__
        for name, parameter in inspect.signature(constructor).parameters.items():
            if name in more or name in ("self", "parent", "name", "kwargs"):
                continue
            initialiser = name.endswith(("_init", "initializer")) and callable(parameter.default)
            if name == "rngs":
                given[name] = rngs
            elif initialiser and name != "carry_init" and self.names:
                given[name] = self.boxed(parameter.default, self.names(f"{kind.__name__}.{name}"))
            elif parameter.default is parameter.empty or name in SET:
                given[name] = ARGUMENTS[name]  # a KeyError: a new class needs a recipe
        return kind(**given)

    def boxed(self, initialiser: Any, names: tuple[str, ...]) -> Any:
        if not self.linen:
            return nnx.with_partitioning(initialiser, names)
        boxes = (nn.with_partitioning, nn.with_logical_partitioning)
        return boxes[len(self.name) % 2](initialiser, names)

    @property
    def batch(self) -> np.ndarray:
        drawn = np.random.default_rng(0).normal(
            size=(ROWS, 5, 6, 8) if self.name == "ConvLSTMCell" else (ROWS, 6, 8)
        )
        drawn = drawn.astype(np.float32)
        return (
            np.arange(ROWS * 4, dtype=np.int32).reshape(ROWS, 4) % 16
            if (self.name == "Embed")
            else drawn
        )

    def options(self, module: Any) -> dict[str, Any]:
        known = inspect.signature(type(module).__call__).parameters
        wanted = {"use_running_average": False, "update_stats": True, "deterministic": True}
        fixed = [name for name in wanted if self.linen and getattr(module, name, None) is not None]
        return {name: on for name, on in wanted.items() if name in known and name not in fixed}

    def init(self) -> Any:
        """What `shardlib.compile` takes."""
        if not self.linen:
            return lambda rngs: self.module(rngs)
        module = self.module()
        return shardlib.linen(module, self.batch, **self.options(module))

    def loss(self, stateful: bool) -> Callable[..., Any]:
        if not self.linen:
            return lambda module, x: jnp.mean(module(x, **self.options(module)) ** 2)
        module = self.module()
        options = self.options(module)

        def of_params(params: Any, x: Any) -> Any:
            return jnp.mean(module.apply({"params": params}, x, **options) ** 2)

        def of_variables(variables: Any, x: Any) -> Any:
            others = [name for name in variables if name != "params"]
            y, updates = module.apply(variables, x, mutable=others, **options)
            return jnp.mean(y**2), updates

        return of_variables if stateful else of_params


class Applied(nnx.Module):
    """A container of layers, which is not a function itself."""

    def __init__(self, parts: Any):
        self.parts = parts

    def __call__(self, x: Any) -> Any:
        return jax.tree.leaves(self.parts, is_leaf=lambda one: isinstance(one, nnx.Linear))[0](x)


class Fp8(nn.Module):
    """An einsum in 8 bits, which has no weights of its own."""

    kind: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        weight = self.param("kernel", nn.initializers.lecun_normal(), (8, 16))
        return self.kind()("abc,cd->abd", x, weight)


@cache
def full_names(case: str) -> Callable[[str], tuple[str, ...]]:
    """Names for all dims of what each initialiser makes; it is learned from models whose leading
    dims alone have names.
    """
    model = read(Layer(case, lambda parameter: (parameter,)).init())
    shapes = {
        ".".join(str(getattr(key, "key", key)) for key in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    }
    ranks: dict[str, int] = {}
    for path, axes in model.axes.items():
        ranks[axes[0]] = min(len(shapes[path]), ranks.get(axes[0], 9))
    return lambda parameter: tuple(f"{parameter} {dim}" for dim in range(ranks.get(parameter, 1)))


def has_params(case: str) -> bool:
    layer = Layer(case, None)
    if not layer.linen:
        return bool(
            jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(layer.module(nnx.Rngs(0)), nnx.Param)))
        )
    module = layer.module()
    variables = jax.eval_shape(
        lambda: module.init(jax.random.key(0), layer.batch, **layer.options(module))
    )
    return bool(variables.get("params"))


def plain_losses(case: str) -> list[float]:
    """Losses of five steps of SGD of the layer without names, on one device."""
    layer, tx, losses = Layer(case, None), optax.sgd(0.1), list[float]()
    if not layer.linen:
        module = layer.module(nnx.Rngs(jax.random.key(0)))
        optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)

        @nnx.jit
        def step(module: Any, optimizer: Any) -> Any:
            value, gradients = nnx.value_and_grad(layer.loss(False))(module, layer.batch)
            optimizer.update(module, gradients)
            return value

        return [float(step(module, optimizer)) for _ in range(STEPS)]
    module = layer.module()
    variables = module.init(jax.random.key(0), layer.batch, **layer.options(module))
    params = variables.pop("params")
    stateful = bool(jax.tree.leaves(variables))
    loss, kept = layer.loss(stateful), tx.init(params)

    @jax.jit
    def update(params: Any, kept: Any, others: Any) -> Any:
        def value(params: Any) -> Any:
            if not stateful:
                return loss(params, layer.batch), others
            return loss({"params": params, **others}, layer.batch)

        (result, after), gradients = jax.value_and_grad(value, has_aux=True)(params)
        changes, new = tx.update(gradients, kept, params)
        return optax.apply_updates(params, changes), new, {**others, **after}, result

    for _ in range(STEPS):
        params, kept, variables, value = update(params, kept, variables)
        losses.append(float(value))
    return losses


def planned_losses(case: str, names: str) -> tuple[list[float], Any]:
    """The same with names of "all" dims or of the "leading" ones, on data 2 x fsdp 2 x tensor 2,
    and the program.
    """
    layer = Layer(case, full_names(case) if names == "all" else lambda one: (one,))
    init = layer.init()
    stateful = bool(jax.tree.leaves(read(init).state))
    program = shardlib.compile(
        init,
        layer.loss(stateful),
        optax.sgd(0.1),
        layer.batch,
        topology="cpu:8",
        pin={"mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    )
    state, losses = program.init(0), list[float]()
    for _ in range(STEPS):
        state, metrics = program.step(state, layer.batch)
        losses.append(float(metrics["loss"]))
    return losses, program
