"""`shardlib.why` on training programs that nobody here wrote: lines, shardings, and what is
avoidable.

    python -m benchmarks why_unseen --sources FOLDER [--only NAME] [--topology v5e:4x2] [--cures 4]

FOLDER has checkouts, which are only read: `flax`, `nanodo`, `maxtext`, `levanter`. What a source
imports and is not installed is replaced by a stand-in. Every program has a process of its own. Its
state and its batch are shapes, sharded as its authors do it where they say so, and otherwise each
array along its largest dim that divides, over `data`, and the batch over `data` too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import brought_programs as brought
from benchmarks.environment import command_line, show, source_digest, stored, write

os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import shardlib
from shardlib.diagnosis.report import Diagnosis
from shardlib.diagnosis.source import shown

#: Sizes at which weights and activations weigh about the same.
SIZES = {
    "vocab_size": 8192, "output_vocab_size": 8192, "emb_dim": 512, "num_heads": 8,
    "num_layers": 4, "qkv_dim": 512, "mlp_dim": 2048, "max_len": 256,
}  # fmt: skip
NANODO_SIZES = {"D": 512, "H": 8, "L": 256, "N": 4, "F": 2048}


def mesh_of(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


MESH = mesh_of(data=4, model=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step, its arguments as shapes with shardings, and where these are from."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    layout: str = "largest dim over data"
    mesh: AbstractMesh | Mesh = MESH
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def struct(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def over(axis: str, tree: Any, *, batch: bool = False, mesh: AbstractMesh = MESH) -> Any:
    """A tree with its arrays sharded over an axis: along their largest dim that divides, or those
    of a batch along their first.
    """

    def leaf(value: Any) -> Any:
        dims = [0] if batch else sorted(range(len(value.shape)), key=lambda d: -value.shape[d])
        divides = [d for d in dims if value.shape and value.shape[d] % mesh.shape[axis] == 0]
        spec = PartitionSpec(*((None,) * divides[0]), axis) if divides else PartitionSpec()
        return struct(value, NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree)


def example(name: str, sources: Path) -> Case:
    """A program of `brought_programs`."""
    program = brought.PROGRAMS[name]
    sys.meta_path.insert(0, brought.Absence())
    sys.path.insert(0, str(sources / program.folder))
    vars(brought).update(ROWS=64, LENGTH=256, VOCAB=8192, NANODO_SIZES=NANODO_SIZES)
    brought.SIZES.update(SIZES)
    made = program.brought(sources, marked=False)
    with nnx.use_eager_sharding(False):
        state = jax.eval_shape(made.init, jax.random.key(0))
    if program.mapped:
        return mapped(made, state, program.mapped)
    if name in AUTHORS:
        return AUTHORS[name](made, state)
    arguments = over("data", state), over("data", made.batch, batch=True)
    return Case(function=made.step, arguments=arguments)


def mapped(made: brought.Brought, state: Any, axis: str) -> Case:
    """A step under `jax.pmap`: one program per device, with the state on each of them."""
    mesh = mesh_of(**{axis: 8})
    whole, parts = PartitionSpec(), PartitionSpec(axis)
    step = jax.shard_map(
        made.step, mesh=mesh, in_specs=(whole, parts), out_specs=whole, check_vma=False
    )
    replicated = jax.tree.map(lambda leaf: struct(leaf, NamedSharding(mesh, whole)), state)
    return Case(
        function=step,
        arguments=(replicated, over(axis, made.batch, batch=True, mesh=mesh)),
        layout="the authors': jax.pmap",
        mesh=mesh,
    )


def lm1b(made: brought.Brought, state: Any) -> Case:
    """`configs/default.py`: logical axes by its rules, and the batch over `data` alone."""
    config = importlib.import_module("configs.default").get_config()
    mesh = mesh_of(data=1, fsdp=4, tensor=2)
    rules = [tuple(rule) for rule in config.logical_axis_rules]
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh, rules)
    batch = NamedSharding(mesh, PartitionSpec(*config.data_sharding))
    return Case(
        function=made.step,
        arguments=(
            jax.tree.map(struct, flax.core.meta.unbox(state), shardings),
            jax.tree.map(lambda leaf: struct(leaf, batch), made.batch),
        ),
        layout="the authors': logical_axis_rules",
        mesh=mesh,
    )


def nanodo(made: brought.Brought, state: Any) -> Case:
    """`train.py`: one axis `data` of all devices, which shards weights and the batch."""
    mesh = mesh_of(data=8)
    shardings = nn.get_sharding(state, mesh)
    return Case(
        function=made.step,
        arguments=(
            jax.tree.map(struct, flax.core.meta.unbox(state), flax.core.meta.unbox(shardings)),
            over("data", made.batch, batch=True, mesh=mesh),
        ),
        layout="the authors': nn.get_sharding",
        mesh=mesh,
    )


def absent(packages: str) -> None:
    """Stand-ins for packages that no step uses."""
    brought.Absence.packages = (*brought.Absence.packages, *packages.split())
    sys.meta_path.insert(0, brought.Absence())


def levanter(sources: Path) -> Case:
    """A Llama, its loss and AdamW, with the mappings of `TrainerConfig` for FSDP and tensor
    parallelism.
    """
    import typing

    absent(
        "git mypy_extensions tqdm_loggable pyarrow tblib async_lru braceexpand transformers"
        " pytimeparse ray humanfriendly requests deepdiff dataclasses_json"
    )
    sys.path.insert(0, str(sources / "levanter/src"))
    # haliax 1.4 takes a type alias from JAX that JAX 0.10 no longer has
    module = sys.modules[jax.tree_util.keystr.__module__]
    vars(module).setdefault("BuiltInKeyEntry", typing.Any)
    import equinox as eqx
    import haliax as hax
    import optax
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample, compute_next_token_loss

    config = LlamaConfig(
        seq_len=512, hidden_dim=1024, intermediate_dim=2816, num_layers=4, num_heads=16,
        num_kv_heads=4,
    )  # fmt: skip
    compute = {"batch": "data", "heads": "model", "mlp": "model"}
    storage = {**compute, "embed": "data"}
    batch, vocab = hax.Axis("batch", 32), hax.Axis("vocab", 32000)
    optimizer = optax.adamw(1e-4)

    def init(key: jax.Array) -> Any:
        model = config.build(vocab, key=key)
        return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def step(state: Any, tokens: Any) -> Any:
        model, opt_state = state
        with hax.axis_mapping(compute):

            def loss_fn(model: Any) -> jax.Array:
                example = hax.vmap(LmExample.causal, "batch")(tokens)
                # its own mean takes a mask of numbers, which JAX 0.10 refuses
                return hax.mean(compute_next_token_loss(model, example, reduction=None)).scalar()

            loss, gradients = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(gradients, opt_state, model)
        model = eqx.apply_updates(model, updates)
        return hax.shard_with_axis_mapping((model, opt_state), storage), loss

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, hax.NamedArray):
            axes = [storage.get(axis.name) for axis in leaf.axes]
            spec = PartitionSpec(*axes)
            return hax.NamedArray(struct(leaf.array, NamedSharding(MESH, spec)), leaf.axes)
        if hasattr(leaf, "shape"):
            return struct(leaf, NamedSharding(MESH, PartitionSpec()))
        return leaf

    def is_named(leaf: Any) -> bool:
        return isinstance(leaf, hax.NamedArray)

    state = eqx.filter_eval_shape(init, jax.random.key(0))
    tokens = hax.NamedArray(
        jax.ShapeDtypeStruct((32, 512), jnp.int32), (batch, hax.Axis("position", 512))
    )
    return Case(
        function=step,
        arguments=(
            jax.tree.map(placed, state, is_leaf=is_named),
            jax.tree.map(placed, tokens, is_leaf=is_named),
        ),
        layout="the authors': axis_mapping",
        within=lambda: jax.sharding.use_abstract_mesh(MESH),
    )


def midgpt(sources: Path) -> Case:
    """Its train step, `shard_gpt` with `shard_model`, and its sharding of the batch."""
    absent("wandb tqdm")
    sys.path.insert(0, str(sources / "midGPT"))
    import equinox as eqx
    import optax
    from src.model import GPT, GPTConfig, shard_gpt
    from src.train import ExperimentConfig, make_training_fns

    sizes = {"block_size": 256, "vocab_size": 8192, "n_layer": 4, "n_head": 8, "n_embd": 512}
    model_config = GPTConfig(dropout=0.0, **sizes)
    settings = dict.fromkeys(field.name for field in dataclasses.fields(ExperimentConfig))
    settings |= {"compute_dtype": "bfloat16", "g_accum_iters": 1, "shard_model": True}
    config = ExperimentConfig(**{**settings, "model_config": model_config})
    mesh = mesh_of(replica=1, data=8)
    optimizer = optax.adamw(1e-3)
    step, _ = make_training_fns(config, optimizer, mesh)

    def init(key: jax.Array) -> Any:
        model = GPT(model_config, key)
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    def laid_out(tree: Any) -> Any:
        """A tree of arrays as `shard_gpt` lays them out."""
        shardings = list[NamedSharding]()
        eqx.filter_eval_shape(
            lambda tree: shard_gpt(tree, mesh, True, lambda x, s: shardings.append(s) or x), tree
        )
        left = iter(shardings)
        return jax.tree.map(lambda x: struct(x, next(left)) if hasattr(x, "shape") else x, tree)

    batch = NamedSharding(mesh, PartitionSpec(None, ("replica", "data"), None))
    tokens = jax.ShapeDtypeStruct((1, 64, 256), jnp.int32, sharding=batch)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=NamedSharding(mesh, PartitionSpec()))
    return Case(
        function=step,
        arguments=(*map(laid_out, eqx.filter_eval_shape(init, key)), tokens, tokens, key),
        layout="the authors': shard_gpt",
        mesh=mesh,
    )


def maxtext(sources: Path) -> Case:
    """Its train step as `train_compile` hands it to JAX, of `base.yml` with smaller sizes."""
    absent(
        "maxtext.checkpoint_conversion maxtext.common.grain_utility maxtext.input_pipeline"
        " pathwaysutils tokamax drjax sympy transformers ml_goodput_measurement"
    )
    sys.path.insert(0, str(sources / "maxtext/src"))
    from flax.linen import partitioning
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    sizes = {
        "base_emb_dim": 1024, "base_num_query_heads": 16, "base_num_kv_heads": 4,
        "base_mlp_dim": 2816, "base_num_decoder_layers": 4, "head_dim": 64, "vocab_size": 32000,
        "max_target_length": 512, "per_device_batch_size": 4, "attention": "dot_product",
        "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "enable_checkpointing": False,
        "run_name": "why", "base_output_directory": "/tmp/maxtext", "skip_jax_distributed_system": True,
        "dataset_type": "synthetic", "log_config": False, "hardware": "cpu",
    }  # fmt: skip
    base = sources / "maxtext/src/maxtext/configs/base.yml"
    config = pyconfig.initialize(["", str(base)], **sizes)
    devices = maxtext_utils.create_device_mesh(config, jax.devices())
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    arguments, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    inputs = sharding.build_zero1_input_state_mesh_shardings(config, state, params)
    data = sharding.get_input_data_sharding(config, mesh)
    function, in_shardings, out_shardings, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, inputs, model, config, params
        )
    )
    rules = functools.partial(partitioning.axis_rules, config.logical_axis_rules)

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with jax.set_mesh(mesh), mesh, rules():
            yield

    step = jax.jit(
        function,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static,
        donate_argnums=donated,
    )
    return Case(
        function=step,
        arguments=arguments,
        layout="the authors': train_compile",
        mesh=mesh,
        within=within,
    )


AUTHORS: Mapping[str, Callable[[brought.Brought, Any], Case]] = {
    "lm1b": lm1b,
    "nanodo": nanodo,
}
EXAMPLES = (
    "lm1b", "wmt", "nlp_seq", "seq2seq", "vae", "imagenet", "sst2", "ppo", "mnist", "nanodo",
    "nnx functional", "nnx train state", "nnx lifted", "nnx vae", "nnx fsdp",
)  # fmt: skip
CASES: dict[str, Callable[[Path], Case]] = {
    **{name: functools.partial(example, name) for name in EXAMPLES},
    "levanter": levanter,
    "midgpt": midgpt,
    "maxtext": maxtext,
}


def measured(diagnosis: Diagnosis, seconds: float) -> dict[str, Any]:
    """The figures of a diagnosis.

    Args:
        seconds: until it was there, cures aside.
    """
    total = diagnosis.communication.wire_bytes
    parts = {
        "with a line": [row for row in diagnosis.rows if row.source.user],
        "with shardings": [row for row in diagnosis.rows if row.meeting],
        "inherent": [row for row in diagnosis.rows if row.inherent],
    }
    return {
        "collectives": len(diagnosis.rows),
        "bytes": total,
        **{
            name: round(sum(row.bytes for row in rows) / total, 4) if total else 1.0
            for name, rows in parts.items()
        },
        "without a line": [
            f"{row.kind} {row.bytes:.3g} B {row.source.name}"
            for row in diagnosis.rows
            if not row.source.user
        ][:6],
        "seconds of compiling": round(diagnosis.communication.compile_seconds, 1),
        "seconds beside it": round(seconds - diagnosis.communication.compile_seconds, 1),
        "programs tried": diagnosis.tried,
        "cures": [
            {
                "place": cure.place,
                "text": cure.text,
                "bytes": cure.bytes,
                "seconds": cure.seconds,
                "rows": [
                    f"{row.kind} over {', '.join(row.axes)}: {shown(row.source)}: {row.reason}"
                    for n, row in enumerate(diagnosis.rows)
                    if diagnosis.cured.get(n) == number
                ][:6],
            }
            for number, cure in enumerate(diagnosis.cures)
        ],
        "problems": list(diagnosis.communication.problems),
    }


def diagnosed(name: str, topology: str, asked: argparse.Namespace, page: Path | None) -> Any:
    """The figures of one program on one machine; cures are looked for in half of its seconds."""
    case = CASES[name](asked.sources)
    times = [time.perf_counter()]

    def say(step: str) -> None:
        print(f"{time.perf_counter() - times[0]:.1f} s: {step}", file=sys.stderr)
        if step.startswith("propagating"):
            times.append(time.perf_counter())

    with case.within():
        diagnosis = shardlib.why(
            case.function,
            *case.arguments,
            topology=topology,
            cures=asked.cures,
            cure_seconds=asked.seconds / 2,
            progress=say,
        )
    seconds = (times[1] if len(times) > 1 else time.perf_counter()) - times[0]
    if page is not None:
        page.with_suffix(".txt").write_text(str(diagnosis))
        page.with_suffix(".hlo").write_text(diagnosis.communication.text)
    mesh = " ".join(f"{axis}={size}" for axis, size in case.mesh.shape.items())
    return {"layout": case.layout, "mesh": mesh, **measured(diagnosis, seconds)}


def main() -> None:
    parser = command_line(__doc__, "why_unseen.json")
    parser.add_argument("--sources", type=Path, required=True, help="folder of the sources")
    parser.add_argument("--only", nargs="+", help="programs", choices=CASES, default=[*CASES])
    parser.add_argument("--topology", nargs="+", default=["cpu:8"])
    parser.add_argument("--cures", type=int, default=4, help="programs compiled to find cures")
    parser.add_argument("--seconds", type=float, default=600.0, help="that one program may take")
    parser.add_argument("--pages", type=Path, help="folder for the texts of diagnoses")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        ((name,), (topology,)) = asked.only, asked.topology
        page = asked.pages and asked.pages / f"{name}-{topology}".replace(" ", "_").replace(
            ":", "_"
        )
        result = diagnosed(name, topology, asked, page)
        print(json.dumps(result))
        return
    for topology in asked.topology:
        for name in asked.only:
            row = apart(name, topology, asked)
            programs = stored(asked.out, "programs") if asked.out.exists() else {}
            programs.setdefault(name, {})[topology] = row
            write(
                asked.out, {"source": source_digest("diagnosis"), "programs": programs}, quiet=True
            )
            keys = ("error", "bytes", "with a line", "with shardings", "seconds beside it")
            show(f"{name} on {topology}", row, *keys)


def apart(name: str, topology: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What is measured of a program, in a process of its own."""
    words = ["--sources", str(asked.sources.absolute()), "--only", name, "--topology", topology]
    words += ["--cures", str(asked.cures), "--seconds", str(asked.seconds), "--child"]
    words += ["--pages", str(asked.pages)] if asked.pages else []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "why_unseen", *words],
            capture_output=True, text=True, timeout=asked.seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {asked.seconds:.0f} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        message = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"error": (message or ["no message"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])
