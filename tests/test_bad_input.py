"""Is every mistake one clear error that says where it is, what was asked, what was found and what
to try?

Whole literal messages, seen from the public interface; all failures of one kind come together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib
from shardlib import models
from shardlib.decisions.pins import Pins
from shardlib.errors import ArgumentError, ModelError, PlanError
from shardlib.training.loggers import TensorBoard
from tests.zoo import decoder, decoder_scan, linen_transformer, mlp, tree_model
from tests.zoo.parity import errors, run_sharded

MLP, DECODER, SCANNED = mlp.CASES[0], decoder.CASES[0], decoder_scan.CASES[0]
SMALL = {"x": np.ones((4, 16), np.float32), "y": np.ones((4, 8), np.float32)}


def plan(
    case: Any = MLP,
    *,
    batch: Any = None,
    topology: str = "cpu:8",
    batch_axes: Any = None,
    pin: Any = None,
) -> shardlib.Plan:
    """Plans a case of the zoo."""
    return shardlib.plan(
        case.init,
        case.loss,
        optax.adam(1e-3),
        dict(case.batch) if batch is None else batch,
        topology=topology,
        pin=pin,
        batch_axes=case.batch_axes if batch_axes is None else batch_axes,
        name=case.name,
    )


def llama(name: str, **kwargs: Any) -> shardlib.Plan:
    """Plans a large preset at 64 sequences of 4096 tokens."""
    config = models.load(name)
    init, loss = models.build(config)
    return shardlib.plan(
        init, loss, optax.adamw(1e-4), models.example_batch(config, 64, 4096), name=name, **kwargs
    )


def compiled(**given: Any) -> shardlib.Program:
    """Compiles a small pytree."""
    given = {
        "loss": lambda p, b: (b["x"] @ p["w"]).mean(),
        "optimizer": optax.sgd(1.0),
        "batch": SMALL,
        "topology": "cpu:4",
        **given,
    }
    return shardlib.compile(shardlib.tree(lambda key: {"w": jnp.ones((16, 8))}), **given)


def needs(params: Any, batch: Any) -> jax.Array:
    """A loss that needs its batch."""
    return (batch["x"] @ params["w"]).mean()


def planned(**options: Any) -> shardlib.Plan:
    """Plans the same."""
    init = shardlib.tree(lambda key: {"w": jnp.ones((16, 8))})
    return shardlib.plan(init, needs, optax.adam(1e-3), SMALL, topology="cpu:4", **options)


def fit(data: Any = lambda step: SMALL, program: Any = None, **options: Any) -> Any:
    """Trains it."""
    return shardlib.fit(compiled() if program is None else program, data, **options)


QUERY = jnp.ones((2, 5, 4, 8))


def attend(**options: Any) -> jax.Array:
    """Attention of ones."""
    return shardlib.attention(QUERY, QUERY, QUERY, **options)


def rowless(batch: Any, pin: Any = None) -> shardlib.Program:
    """Compiles a loss that needs no batch for two devices along data."""
    return compiled(
        loss=lambda p, b: (p["w"] ** 2).mean(),
        batch=batch,
        pin={"mesh": {"data": 2}} if pin is None else pin,
    )


def named_twice(rngs: nnx.Rngs) -> nnx.Module:
    """A layer whose kernel has one name twice and whose bias has a name too many."""
    return nnx.Linear(
        16,
        16,
        kernel_metadata={"out_sharding": ("embed", "embed")},
        bias_metadata={"out_sharding": ("a", "b")},
        rngs=rngs,
    )


RETURN = '\nTry: return jnp.mean(...), or return jnp.mean(...), {"name": metric}'
ROWS = (
    "\nTry: a batch whose arrays have their rows along the first dim, or batch_axes that say where"
    " they are"
)
SEED = "\nTry: an integer from 0 to 2147483647"
#: One argument of `shardlib.compile`, what is said of it, and what to try.
ARGUMENTS: dict[str, tuple[Any, str, str]] = {
    "loss": (None, "None, not a function", "loss=lambda model, batch: jnp.mean(...)"),
    "evaluation": ("a", "'a', not a function", "evaluation=lambda model, batch: jnp.mean(...)"),
    "optimizer": (
        optax.adam,
        "the function adam, not an optax transformation",
        "optimizer=optax.adam(1e-3)",
    ),
    "topology": (
        3,
        "3, not a topology",
        'topology="cpu:8", a jax.sharding.Mesh, or a list of devices',
    ),
    "batch": (
        64,
        "64, not a tree of arrays, of which the leading dim is the number of rows",
        'batch={"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}',
    ),
    "pin": (["mesh"], "a list, not a mapping of decisions", 'pin={"mesh": {"data": 8}}'),
    "name": (3, "3, not a string", 'name="model"'),
    "plan": (
        "x",
        "'x', not a plan",
        "plan=shardlib.plan(...), or plan=shardlib.Plan.from_json(text)",
    ),
    "devices": (3, "3, not a list of devices", "devices=jax.devices()"),
    "guards": (3, "3, not guards", "guards=shardlib.Guards(clip=1.0)"),
    "disk": (3, "3, not the path of a folder", 'disk="/path"'),
}

#: Values that `shardlib.Settings` refuses, and how a message shows each.
SETTINGS: list[tuple[str, Any, str]] = [
    ("run", 5, "5"),
    ("run", ["a"], "a list"),
    ("run", "", "''"),
    ("run", "a\0b", r"'a\x00b'"),
    ("save_every", "x", "'x'"),
    ("save_every", float("nan"), "nan"),
    ("save_every", True, "True"),
    ("save_every", -1, "-1"),
    ("save_every", 2.5, "2.5"),
    ("save_every", None, "None"),
    ("save_every", -(10**5000), "an integer of 16610 bits"),
    ("save_seconds", 10**400, "an integer of 1329 bits"),
    ("keep", 3, "3"),
    ("policy", "x", "'x'"),
    ("hang_seconds", "x", "'x'"),
    ("hang_seconds", float("inf"), "inf"),
    ("profile", 3, "3"),
    ("profile", (1, "x"), "(1, 'x')"),
    ("profile", (1, 2, 3), "(1, 2, 3)"),
    ("allow_changes", 5, "5"),
    ("allow_changes", (5,), "(5,)"),
    ("doctor_seconds", "x", "'x'"),
    ("validation", 3, "3"),
    ("callbacks", 3, "3"),
    ("callbacks", (3,), "(3,)"),
    ("loggers", (TensorBoard,), "a tuple"),
]
SETTINGS_NAMES = {name for name, *_ in SETTINGS}
#: Values that `shardlib.Guards` refuses, and how a message shows each.
GUARDS: list[tuple[str, Any, str]] = [
    ("clip", "x", "'x'"),
    ("clip", True, "True"),
    ("clip", 0, "0"),
    ("scale", [], "a list"),
    ("scale", float("inf"), "inf"),
    ("growth", "x", "'x'"),
    ("growth", None, "None"),
    ("spike", 20.0, "20.0"),
]

#: What is done, the error, and its whole message, or parts of it in a list.
ERRORS: dict[str, tuple[Callable[[], Any], type[shardlib.ShardlibError], str | list[str]]] = {
    "misspelt logical axes": (
        lambda: plan(
            pin={"rules": [("mpl", "tensor"), ("batch", ("data", "fsdp")), ("embd", "tensor")]}
        ),
        shardlib.PinError,
        (
            "pinned rules do not fit the model:\n  - no dim is named 'mpl'; did you mean 'mlp'?"
            " (names are batch, classes, embed, hidden, mlp)\n  - no dim is named 'embd'; did you"
            " mean 'embed'? (names are batch, classes, embed, hidden, mlp)"
        ),
    ),
    "misspelt mesh axis in rules": (
        lambda: plan(pin={"rules": [("mlp", "tenser")]}),
        shardlib.PinError,
        (
            "pins are not usable: rules: 'mlp' -> 'tenser' is not a mesh"
            " axis\nTry: mesh axes are stage, data, fsdp, expert, context, tensor"
        ),
    ),
    "misspelt mesh axis": (
        lambda: plan(pin={"mesh": {"tenser": 8}}),
        shardlib.PinError,
        (
            "pins are not usable: 'tenser' is not a mesh axis; did you mean 'tensor'? mesh axes are"
            " stage, data, fsdp, expert, context, tensor"
        ),
    ),
    "misspelt decisions, all of them": (
        lambda: plan(pin={"remta": "full", "zero": 7, "mesh": {"data": 8}}),
        shardlib.PinError,
        [
            "pins are not usable:\n  - 'remta' is not a decision; did you mean 'remat'? (decisions",
            "\n  - zero is 7; it is one of 0, 1, 2, 3",
        ],
    ),
    "dtypes by their short names": (
        lambda: plan(pin={"moment_dtype": "bf16", "matmul_dtype": "e4m3", "param_dtype": "int8"}),
        shardlib.PinError,
        (
            "pins are not usable:\n"
            "  - moment_dtype is 'bf16'; it is one of float32, bfloat16, float16; did you mean"
            " 'bfloat16'?\n"
            "  - matmul_dtype is 'e4m3'; it is one of float32, bfloat16, float16, float8_e4m3fn,"
            " float8_e5m2; did you mean 'float8_e4m3fn'?\n"
            "  - param_dtype is 'int8'; it is one of float32, bfloat16, float16"
        ),
    ),
    "policies of layer groups where no layers repeat": (
        lambda: plan(pin={"remat_classes": {"foo": "full"}}),
        shardlib.PinError,
        (
            "remat_classes names 'foo', and mlp-annotated has no layer groups: none of its layers"
            " repeat\nTry: layers with parameters of equal shapes, in a list or under a scan, or no"
            " remat_classes"
        ),
    ),
    "policies of layer groups that there are not": (
        lambda: plan(SCANNED, pin={"remat_classes": {"foo": ["dots", 2], "layers": "none"}}),
        shardlib.PinError,
        (
            "remat_classes does not fit the layer groups of decoder-scan-annotated, which are"
            " blocks:\n"
            "  - 'foo' is not one of them\n"
            "  - 'layers' is not one of them\n"
            "Try: remat_classes={'blocks': 'full'}"
        ),
    ),
    "a name twice in one parameter": (
        lambda: shardlib.plan(
            named_twice,
            lambda m, b: m(b["x"]).sum(),
            optax.sgd(1.0),
            {"x": np.ones((8, 16), np.float32)},
            topology="cpu:8",
        ),
        shardlib.AnnotationError,
        (
            "logical axes do not fit their arrays:\n"
            "  - bias: 2 names ('a', 'b') for an array of 1 dims (16,)\n"
            "  - kernel: 'embed' names two dims of ('embed', 'embed'), shape (16, 16)\n"
            "Try: write one distinct name or None per dim"
        ),
    ),
    "a name twice in one array of a tree": (
        lambda: shardlib.plan(
            shardlib.tree(tree_model.initialise, {**tree_model.AXES, "head": ("embed", "embed")}),
            tree_model.CASES[0].loss,
            optax.sgd(1.0),
            dict(tree_model.CASES[0].batch),
            topology="cpu:8",
        ),
        shardlib.AnnotationError,
        (
            "logical axes do not fit their arrays: head: 'embed' names two dims of ('embed',"
            " 'embed'), shape (32, 64)\nTry: write one distinct name or None per dim"
        ),
    ),
    "a name twice in the batch": (
        lambda: plan(batch_axes={"x": ("batch", "batch"), "y": ("batch",)}),
        shardlib.BatchError,
        (
            "batch_axes does not fit the batch:\n"
            "  - batch.x: 'batch' names two dims of ('batch', 'batch')\n"
            "  - batch.y: 1 names ('batch',) for shape (8, 8)\n"
            "Try: give one name, or None, per dim"
        ),
    ),
    "names for another batch": (
        lambda: plan(batch_axes={"x": ("batch", "embed")}),
        shardlib.BatchError,
        (
            "batch_axes has another structure than the batch, PyTreeDef({'x': *, 'y': *}): Dict key"
            " mismatch; expected keys: ['x', 'y']; present keys: ['x'].\nTry: one tuple of names"
            " per array, in the same dicts and lists as the batch"
        ),
    ),
    "rules that do not divide": (
        lambda: plan(
            DECODER,
            pin={
                "mesh": {"tensor": 8},
                "rules": [("batch", ("data", "fsdp")), ("kv_heads", "tensor"), ("mlp", "tensor")],
            },
        ),
        shardlib.PinError,
        (
            "pinned rules do not fit the pinned mesh tensor=8: 'kv_heads' -> tensor: its dims have"
            " the largest common size 2, which 8 parts do not divide\nTry: a tensor axis that"
            " divides them, or the rule to None"
        ),
    ),
    "sequence parallelism without a sequence": (
        lambda: plan(pin={"mesh": {"tensor": 8}, "sequence_parallel": True}),
        shardlib.PinError,
        (
            "sequence_parallel=True shards the sequence over tensor=8, and mlp-annotated has no"
            ' sequence\nTry: sequence_parallel=False, or name the dim "seq" in batch_axes'
        ),
    ),
    "a topology larger than any": (
        lambda: plan(topology="cpu:1000000000"),
        shardlib.TopologyError,
        (
            "topology 'cpu:1000000000' has a size of more than 999,999,999, which no machine has."
            " Spellings: 'cpu:8', 'h100:8', '16*h100:8', 'v5e:16x16', 'v5p:4x4x8', '2*v5e:16x16',"
            " or a path to a .toml file"
        ),
    ),
    "a host of more simulated devices than there can be": (
        lambda: plan(topology="cpu:2000000"),
        shardlib.TopologyError,
        (
            "topology 'cpu:2000000' asks for 2000000 devices of one host; cpu has at most 1048576."
            " Write '2*cpu:1000000' for 2 domains joined by loopback"
        ),
    ),
    "more alternatives than anyone reads": (
        lambda: plan(topology="h100:1").alternatives(10**9),
        shardlib.ArgumentError,
        (
            "alternatives: count is 1000000000; it is at most 1000, as every alternative becomes a"
            " whole plan that is compared with this one, which takes hundredths of a second\nTry:"
            " plan.alternatives(10), and plan.why_not(...) for a plan further down"
        ),
    ),
    "sizes that no mesh has": (
        lambda: plan(pin={"mesh": {"data": 0, "tensor": 1.5}, "zero": 7}),
        shardlib.PinError,
        (
            "pins are not usable:\n"
            "  - mesh axis 'data' has size 0; sizes are integers of at least 1\n"
            "  - mesh axis 'tensor' has size 1.5; sizes are integers of at least 1\n"
            "  - zero is 7; it is one of 0, 1, 2, 3"
        ),
    ),
    "microbatches of one part": (
        lambda: plan(topology="h100:1", pin={"microbatches": 3}),
        shardlib.PinError,
        "microbatches=3 does not divide the 8 examples of the batch\nTry: one of 1, 2, 4, 8",
    ),
    "a negative number of alternatives": (
        lambda: plan(topology="h100:1").alternatives(-1),
        ArgumentError,
        (
            "alternatives: count is -1; it is an integer of at least 0, how many plans are wanted"
            "\nTry: plan.alternatives(10)"
        ),
    ),
    "a path in the place of a plan": (
        lambda: shardlib.Plan.from_json(b"plan.json"),
        shardlib.PlanError,
        (
            "the plan is not valid JSON: Expecting value at line 1, column 1, where 'plan.json'"
            " stands\nTry: the text itself, as"
            " shardlib.Plan.from_json(Path('plan.json').read_text())"
        ),
    ),
    "a plan that ends too early": (
        lambda: shardlib.Plan.from_json('{"format": 1,'),
        shardlib.PlanError,
        (
            "the plan is not valid JSON: Expecting property name enclosed in double quotes at line"
            " 1, column 14, where the text ends"
            "\nTry: the text itself, as shardlib.Plan.from_json(Path('plan.json').read_text())"
        ),
    ),
    "an unknown chip": (
        lambda: plan(topology="h1000:8"),
        shardlib.TopologyError,
        (
            "topology 'h1000:8' names the unknown chip 'h1000'. Did you mean 'h100:8'? Chips: v4,"
            " v5e, v5p, v6e, tpu7x, a100, a100-40gb, h100, h200, b200, gb200, cpu; any other"
            " cluster can be described in a .toml file"
        ),
    ),
    "pins that contradict each other, all of them": (
        lambda: plan(
            pin={"mesh": {"data": 8}, "mesh.tensor": 2, "zero": 3, "sequence_parallel": True}
        ),
        shardlib.PinError,
        (
            "pins are not usable:\n"
            "  - mesh.tensor=2 contradicts mesh={'data': 8}\n"
            "  - zero=3 shards over fsdp, which is pinned to 1\n"
            "  - sequence_parallel=True shards the sequence over tensor, which is pinned to 1\n"
            "Try: mesh, or mesh.tensor alone; mesh.fsdp=2 or more, or zero=0; mesh.tensor=2 or"
            " more, or sequence_parallel=False"
        ),
    ),
    "more devices than there are": (
        lambda: shardlib.compile(
            MLP.init,
            MLP.loss,
            optax.sgd(1.0),
            dict(MLP.batch),
            topology="cpu:16",
            pin={"mesh": {"fsdp": 8, "tensor": 2}},
        ),
        shardlib.TopologyError,
        (
            "the mesh fsdp=8 x tensor=2 needs 16 devices, JAX sees 8 (cpu)\nTry: simulate them on"
            " the CPU: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=16 in the environment, or"
            ' jax.config.update("jax_num_cpu_devices", 16) before JAX is first used'
        ),
    ),
    "a Linen module without inputs": (
        lambda: shardlib.plan(
            linen_transformer.LinenDecoder(annotated=True),
            MLP.loss,
            optax.sgd(1.0),
            dict(MLP.batch),
            topology="cpu:8",
        ),
        shardlib.AnnotationError,
        (
            "init is the Linen module LinenDecoder, which needs sample inputs\nTry:"
            " shardlib.linen(module, *sample_inputs)"
        ),
    ),
    "a module that is built already": (
        lambda: shardlib.plan(
            mlp.MLP(nnx.Rngs(0), annotated=False),
            MLP.loss,
            optax.sgd(1.0),
            dict(MLP.batch),
            topology="cpu:8",
        ),
        shardlib.AnnotationError,
        (
            "init is a MLP that is built already; shardlib builds it sharded from the start\nTry:"
            " lambda rngs: MLP(..., rngs=rngs)"
        ),
    ),
    "arguments of other kinds, all of them": (
        lambda: compiled(optimizer=None, guards=3),
        ArgumentError,
        (
            "shardlib.compile cannot use its arguments:\n"
            "  - optimizer is None, not an optax transformation\n"
            "  - guards is 3, not guards\n"
            "Try: optimizer=optax.adam(1e-3); guards=shardlib.Guards(clip=1.0)"
        ),
    ),
    "arguments of plan": (
        lambda: shardlib.plan(
            MLP.init,
            MLP.loss,
            optax.sgd(1.0),
            SMALL,
            topology="cpu:8",
            pin="mesh",
            allow=["bfloat16"],
        ),
        ArgumentError,  # pyright: ignore[reportArgumentType]
        (
            "shardlib.plan cannot use its arguments:\n"
            "  - pin is 'mesh', not a mapping of decisions\n"
            "  - allow is a list, not a mapping of dtypes\n"
            'Try: pin={"mesh": {"data": 8}}; allow={"moment_dtype": ["bfloat16"]}'
        ),
    ),
    "a loss that returns nothing": (
        lambda: compiled(loss=lambda p, b: None),
        shardlib.TracingError,
        "the loss returned None; expected a scalar or a pair (scalar, dict of metrics)" + RETURN,
    ),
    "a loss that returns a list": (
        lambda: compiled(loss=lambda p, b: [1.0]),
        shardlib.TracingError,
        "the loss returned list; expected a scalar or a pair (scalar, dict of metrics)" + RETURN,
    ),
    "words in the batch": (
        lambda: compiled(batch={**SMALL, "name": "abc", "names": np.array(["a"] * 4)}),
        shardlib.BatchError,
        (
            "the batch holds what is not an array of numbers or random keys:\n"
            "  - batch.name is a str\n"
            "  - batch.names is an array of <U1\n"
            "Try: leave it out of the batch; tokens are integers"
        ),
    ),
    "a batch of no rows": (
        lambda: compiled(
            batch={"x": np.ones((0, 16), np.float32), "y": np.ones((0, 8), np.float32)}
        ),
        shardlib.BatchError,
        (
            "the batch has no rows:\n"
            "  - batch.x: shape (0, 16)\n"
            "  - batch.y: shape (0, 8)\n"
            "Try: a batch of at least one row"
        ),
    ),
    "an empty batch": (
        lambda: rowless({}),
        shardlib.BatchError,
        "the mesh data=2 would shard the rows of the batch, and it has no arrays" + ROWS,
    ),
    "a batch of scalars": (
        lambda: rowless({"x": 3.0}, {"microbatches": 2}),
        shardlib.BatchError,
        "microbatches=2 would shard the rows of the batch, and it has no dim called batch: batch.x"
        " []" + ROWS,
    ),
    "a number for a decision": (
        lambda: plan(pin={1: 2}),
        shardlib.PinError,
        ["1 is not a decision", "word"],
    ),
    "a difference to a number": (
        lambda: plan().diff(cast("Any", 3)),
        ArgumentError,
        ["other is int"],
    ),
    "a plan of a number": (
        lambda: shardlib.Plan.from_json(cast("Any", 3)),
        shardlib.PlanError,
        ["int and no text"],
    ),
    "steps in words": (lambda: fit(steps="3"), ArgumentError, ["steps is '3'", "steps=1000"]),
    "negative steps": (lambda: fit(steps=-2), ArgumentError, ["steps is -2", "from 0 on"]),
    "a list of batches": (lambda: fit([SMALL], steps=1), ArgumentError, ["data is a list"]),
    "no program": (
        lambda: fit(program=needs, steps=1, settings=3),
        ArgumentError,
        ["program is the function needs", "settings is 3"],
    ),
    "a scale in words": (lambda: attend(scale="a"), shardlib.ModelError, ["scale is 'a'"]),
    "a negative softcap": (
        lambda: attend(softcap=-1.0),
        shardlib.ModelError,
        ["softcap=-1 is negative"],
    ),
    "attention of numbers": (
        lambda: shardlib.attention(cast(Any, 1), cast(Any, 2), cast(Any, 3)),
        ArgumentError,
        (
            "shardlib.attention cannot use its arguments:\n"
            "  - query is 1, not an array [batch, queries, heads, width], or several such arrays\n"
            "  - key is 2, not an array [batch, keys, key heads, width], or several such arrays\n"
            "  - value is 3, not an array [batch, keys, key heads, width]\n"
            "Try: query=jnp.ones((2, 128, 8, 64)); key=jnp.ones((2, 128, 8, 64));"
            " value=jnp.ones((2, 128, 8, 64))"
        ),
    ),
    "attention of matrices": (
        lambda: shardlib.attention(*[jnp.ones((2, 3))] * 3),
        ArgumentError,
        ["query is an array of shape (2, 3), not", "key is an array", "value is an array"],
    ),
    "attention of no arrays": (
        lambda: shardlib.attention([], [], QUERY),
        ArgumentError,
        ["query is a list, not", "key is a list, not"],
    ),
    "routes of a number": (
        lambda: shardlib.route(cast(Any, 5), 5),
        ArgumentError,
        (
            "shardlib.route cannot use its arguments: logits is 5, not an array [..., experts] of"
            " logits of the router\nTry: logits=jnp.ones((2, 128, 8))"
        ),
    ),
    "routes to a fraction of experts": (
        lambda: shardlib.route(jnp.ones((4, 8)), cast(Any, 2.0), bias=cast(Any, 3)),
        ArgumentError,
        ["k is 2.0, not an integer", "bias is 3, not an array [experts]"],
    ),
    "a negative block": (lambda: attend(block=-2), shardlib.ModelError, ["block=-2 is negative"]),
    "other segments": (
        lambda: attend(segments=jnp.ones((2, 7), jnp.int32)),
        shardlib.ModelError,
        ["segments are (2, 7)", "(2, 5)"],
    ),
    "options of plan": (
        lambda: planned(name=7, limits=3),
        ArgumentError,
        ["name is 7, not a string", "limits is 3"],
    ),
    "rows in other words": (
        lambda: planned(rows="sum"),
        ArgumentError,
        ["rows is 'sum' and neither 'prove' nor 'mean'"],
    ),
    "nothing for a batch": (
        lambda: compiled(loss=needs, batch=None),
        shardlib.BatchError,
        ["the batch has no rows"],
    ),
    "an empty batch that a loss needs": (
        lambda: compiled(loss=needs, batch={}),
        shardlib.BatchError,
        ["the batch has no rows", "KeyError: 'x'"],
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_a_mistake_is_one_clear_error(mistake: str) -> None:
    run, kind, message = ERRORS[mistake]
    with pytest.raises(kind) as caught:
        run()
    if isinstance(message, str):
        assert str(caught.value) == message
    else:
        assert all(part in str(caught.value) for part in message), str(caught.value)


@pytest.mark.parametrize("pin", [None, {"zero": 0}, Pins.parse({"zero": 0})])
def test_one_dtype_may_be_allowed_without_a_list(pin: Any) -> None:
    one, several = (
        planned(pin=pin, allow={"moment_dtype": dtypes}).dtypes
        for dtypes in ("bfloat16", ["bfloat16"])
    )
    assert one == several == (("moment_dtype", "bfloat16"),)


@pytest.mark.parametrize("scale", [0.5, 1, np.float32(0.5), jnp.float32(0.5)])
def test_a_scale_is_any_number(scale: Any) -> None:
    assert attend(scale=scale).shape == QUERY.shape


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_kind_is_refused_before_anything_is_traced(name: str) -> None:
    value, said, hint = ARGUMENTS[name]
    with pytest.raises(ArgumentError) as caught:
        shardlib.compile(
            **{"init": None, "loss": len, "optimizer": optax.sgd(1.0), "batch": None, name: value}
        )
    assert (
        str(caught.value)
        == f"shardlib.compile cannot use its arguments: {name} is {said}\nTry: {hint}"
    )


def test_what_a_program_is_given_is_looked_at() -> None:
    program = compiled(evaluation=lambda p, b: None)
    for seed, said in (
        (-1, "seed -1 is out of range"),
        (2**31, "seed 2147483648 is out of range"),
        (1.5, "seed is 1.5, not an integer"),
        ("3", "seed is '3', not an integer"),
    ):
        with pytest.raises(ArgumentError) as caught:
            program.init(seed)  # pyright: ignore[reportArgumentType]
        assert isinstance(caught.value, ValueError) and str(caught.value) == said + SEED
    with pytest.raises(shardlib.TracingError, match=r"the loss returned None; expected a scalar"):
        program.evaluate(program.init(0), SMALL)


@pytest.mark.long
def test_a_model_that_cannot_fit_is_told_the_smallest_relaxation() -> None:
    with pytest.raises(shardlib.InfeasibleError) as caught:
        llama("llama3-8b", topology="h100:1")
    text = str(caught.value)
    assert text.startswith("llama3-8b does not fit on h100:1: the leanest plan (one device, ")
    assert " GiB more than the " in text and "parameters 29.9 GiB" in text
    suggestion = text.split("Try: the topology ")[1].split(" ")[0]
    assert llama("llama3-8b", topology=suggestion).topology == suggestion


@pytest.mark.long
def test_a_pin_that_does_not_fit_is_the_one_to_relax() -> None:
    with pytest.raises(shardlib.InfeasibleError) as caught:
        llama(
            "llama3-8b",
            topology="h100:8",
            pin={"mesh": {"data": 8}, "attention": "traced", "remat": "none"},
        )
    assert "Try: leaving mesh to the planner" in str(caught.value)
    assert llama("llama3-8b", topology="h100:8").mesh.devices == 8


def test_a_fallback_rule_is_taken_where_the_first_does_not_divide() -> None:
    rules = [
        ["batch", ["data", "fsdp"]],
        ["kv_heads", ["tensor"]],
        ["kv_heads", None],
        ["mlp", ["tensor"]],
    ]
    found = plan(DECODER, pin={"mesh": {"data": 2, "tensor": 4}, "rules": rules})
    cut = {parameter.path: parameter.compute.axes for parameter in found.parameters}
    assert not cut["blocks.0.attention.k"] and cut["blocks.0.mlp.up"] == {"tensor"}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}])
def test_a_usual_list_of_rules_fits_every_mesh(mesh: dict[str, int]) -> None:
    rules = [
        ("batch", ("data", "fsdp")),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("vocab", "tensor"),
        ("embed", "fsdp"),
    ]
    up = {
        parameter.path: parameter
        for parameter in plan(DECODER, pin={"mesh": mesh, "rules": rules}).parameters
    }["blocks.0.mlp.up"]
    assert up.compute.axes == {"tensor"} & set(mesh)


def test_a_batch_that_leaves_devices_idle_is_said() -> None:
    found = plan(
        batch={"x": np.ones((3, 16), np.float32), "y": np.ones((3, 8), np.float32)},
        pin={"mesh.tensor": 1, "mesh.data": 3},
    )
    assert found.mesh.devices == 3
    assert [finding.code for finding in found.findings if finding.severity == "warning"] == [
        "idle-devices"
    ]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("case", [MLP, linen_transformer.CASES[0]], ids=lambda case: case.name)
def test_a_mesh_that_the_user_has_set_changes_nothing(
    case: Any, kind: jax.sharding.AxisType
) -> None:
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(kind,))):
        sharded = run_sharded(case, {"mesh": {"data": 4, "tensor": 2}})
    assert max(errors(sharded.loss, sharded.gradients, case.reference(0)).values()) <= 1


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        *((shardlib.Settings, *row) for row in SETTINGS),
        *((shardlib.Guards, *row) for row in GUARDS),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_settings_of_another_kind_are_refused(
    kind: Callable[..., Any], name: str, value: Any, says: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        kind(**{name: value})
    assert f": {name} is {says}, not " in str(caught.value)
    assert f"\nTry: {name}=" in str(caught.value)
    assert isinstance(caught.value, ModelError) and isinstance(caught.value, PlanError)


def test_all_settings_of_another_kind_come_together() -> None:
    with pytest.raises(ArgumentError) as caught:
        shardlib.Settings(**cast(Any, dict.fromkeys(SETTINGS_NAMES, object())))
    assert len(caught.value.failures) == len(SETTINGS_NAMES)
    assert {field.name for field in dataclasses.fields(shardlib.Settings)} == SETTINGS_NAMES


def test_numbers_of_numpy_and_jax_are_settings() -> None:
    shardlib.Settings(save_every=cast(int, np.int64(5)), hang_seconds=cast(float, jnp.float32(9)))
    shardlib.Guards(clip=cast(float, np.float32(1.0)), growth=cast(int, jnp.int32(5)))
