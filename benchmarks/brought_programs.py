"""Whole training programs of others, brought as they are: lines changed, and numbers beside plain
`jax.jit`.

    python -m benchmarks brought_programs --sources FOLDER [--only NAME] [--seconds 300]

FOLDER holds what is not ours and is only read: `flax` (a checkout of google/flax, for its
`examples`) and `nanodo` (google-deepmind/nanodo). What a source imports and is not installed
(TensorFlow, datasets, pictures) is replaced by a stand-in, as no step uses it.

Each program has a state as its source makes it, on small sizes, and the source's own step; it runs
in a process of its own, three steps on one device under `jax.jit`, and the same under
`shardlib.compile_step` on `data 2 x fsdp 2 x tensor 2` with ZeRO 3. Then its loss is marked: in the
text of its step `jax.value_and_grad`, or that of NNX, becomes `shardlib.value_and_grad`, the only
other line that changes. A marked loss is also run in four microbatches, where its rows do not meet
(as they do in BatchNorm).

A difference is that of an array, as a part of the array's largest number. Adam divides gradients by
their size, and what is zero but for rounding becomes as large as all else; so the same is given for
plain JAX with a state that is moved by half a unit in the last place, and arrays that this moves by
more than 1e-3 are counted and left out. Where what is left is more than 1e-5, the program is run in
float64, too, where rounding is 2e-9 of that in float32 and another result stays what it is.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

import shardlib
from benchmarks.environment import RESULTS, command_line, show, source_digest, stored, table, write

STEPS, ROWS, LENGTH, VOCAB = 3, 16, 16, 64
MESH: dict[str, Any] = {"mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "zero": 3}
#: What each run adds to the mesh; all but the first have their loss marked.
UNMARKED = "as it is"
PINS: dict[str, dict[str, Any]] = {
    UNMARKED: {},
    "marked": {},
    "marked, 4 microbatches": {"microbatches": 4},
}
#: An array that rounding alone moves by more than this part of it is noise.
NOISE = 1e-3
#: The same in float64.
NOISE_DOUBLE = 1e-9
#: What is promised.
LIMIT = 1e-5


class Brought(NamedTuple):
    """A program as its source has it: key -> state; (state, batch) -> (state, metrics), or the state
    alone; and a batch.
    """

    init: Callable[[jax.Array], Any]
    step: Callable[[Any, Any], Any]
    batch: Any


class Absent(types.ModuleType):
    """Stands for a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


class Absence:
    """Finds stand-ins for packages of data and pictures, and for what is in them."""

    packages = ("tensorflow", "tensorflow_datasets", "tensorflow_text", "tensorboard", "datasets",
                "clu.metric_writers", "clu.periodic_actions", "matplotlib", "grain", "sklearn",
                "sentencepiece", "cv2", "gym", "PIL")  # fmt: skip

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return Absent(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


@dataclass(frozen=True, kw_only=True)
class Source:
    """A folder of sources, whose modules are read with the loss marked or not, and with float64 for
    float32 or not.
    """

    folder: Path
    marked: bool
    double: bool = False

    def module(self, name: str, *, script: bool = False) -> Any:
        """A module of the folder; of a script what is defined before its first loop."""
        path = self.folder / f"{name}.py"
        text = path.read_text()
        if self.double:
            text = text.replace("float32", "float64")
        if self.marked:
            for word in ("nnx.value_and_grad(", "jax.value_and_grad("):
                text = text.replace(word, "shardlib.value_and_grad(")
        tree = ast.parse(text)
        if script:
            first = next(
                (at for at, one in enumerate(tree.body) if isinstance(one, ast.For)),
                len(tree.body),
            )
            defined = (
                ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign
            )  # fmt: skip
            tree.body = [
                one for one in tree.body[:first]
                if isinstance(one, defined) and "load_dataset" not in ast.unparse(one)
                and "dataset[" not in ast.unparse(one) and "X_t" not in ast.unparse(one)
            ]  # fmt: skip
        module = types.ModuleType(name)
        module.__file__, module.__dict__["shardlib"] = str(path), shardlib
        sys.modules[name] = module
        exec(compile(tree, str(path), "exec"), module.__dict__)
        return module

    def has(self, name: str, line: str) -> bool:
        """Whether a module has a line, spaces apart."""
        squeezed = "".join((self.folder / f"{name}.py").read_text().split())
        return "".join(line.split()) in squeezed


def tokens(number: int, *shape: int, low: int = 1) -> np.ndarray:
    return np.random.default_rng(number).integers(low, VOCAB, shape).astype(np.int32)


def normal(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=shape).astype(np.float32)


KEY = jax.random.key(7)
SIZES = {"vocab_size": VOCAB, "output_vocab_size": VOCAB, "emb_dim": 32, "num_heads": 4,
         "num_layers": 2, "qkv_dim": 32, "mlp_dim": 64, "max_len": LENGTH}  # fmt: skip
NANODO_SIZES = {"D": 32, "H": 4, "L": LENGTH, "N": 2, "F": 64}


def lm1b(source: Source) -> Brought:
    models, utils, train = map(source.module, ("models", "utils", "train"))
    config = models.TransformerConfig(**SIZES)
    schedule = train.create_learning_rate_schedule(learning_rate=1e-2, warmup_steps=2)
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    model = models.TransformerLM(config.replace(deterministic=True))
    sizes = types.SimpleNamespace(per_device_batch_size=ROWS, max_target_length=LENGTH)
    return Brought(
        functools.partial(utils.init_train_state, model, tx, sizes),
        lambda state, batch: train.train_step(state, batch, config, schedule, 0.0, KEY),
        {"inputs": tokens(1, ROWS, LENGTH)},
    )


def wmt(source: Source) -> Brought:
    models, train = map(source.module, ("models", "train"))
    config = models.TransformerConfig(**SIZES)
    schedule = train.create_learning_rate_schedule(learning_rate=1e-2, warmup_steps=2)

    def init(key: jax.Array) -> Any:
        model = models.Transformer(config.replace(deterministic=True))
        shape = jnp.ones((ROWS, LENGTH), jnp.float32)
        return train.TrainState.create(
            apply_fn=model.apply,
            params=model.init(key, shape, shape)["params"],
            tx=optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1),
            dynamic_scale=None,
        )

    return Brought(
        init,
        lambda state, batch: train.train_step(state, batch, config, schedule, dropout_rng=KEY),
        {"inputs": tokens(1, ROWS, LENGTH), "targets": tokens(2, ROWS, LENGTH)},
    )


def nlp_seq(source: Source) -> Brought:
    models, train = map(source.module, ("models", "train"))
    model = models.Transformer(models.TransformerConfig(**SIZES))
    schedule = train.create_learning_rate_scheduler(base_learning_rate=0.05)

    def init(key: jax.Array) -> Any:
        made = model.init(key, inputs=jnp.ones((LENGTH, 1), jnp.float32), train=False)
        tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=1e-1)
        return train_state.TrainState.create(apply_fn=model.apply, params=made["params"], tx=tx)

    return Brought(
        init,
        lambda state, batch: train.train_step(state, batch, model, schedule, KEY),
        {"inputs": tokens(1, ROWS, LENGTH), "targets": tokens(2, ROWS, LENGTH)},
    )


def seq2seq(source: Source) -> Brought:
    table = source.module("input_pipeline").CharacterTable("0123456789+= ", 3)
    source.module("models")
    train = source.module("train")
    train.FLAGS = types.SimpleNamespace(hidden_size=32, learning_rate=0.003)
    random.seed(0)  # which draws the batch
    return Brought(
        lambda key: train.get_train_state(key, table),
        lambda state, batch: train.train_step(state, batch, KEY, table.eos_id),
        jax.tree.map(np.asarray, table.get_batch(ROWS)),
    )


def vae(source: Source) -> Brought:
    models, train = map(source.module, ("models", "train"))

    def init(key: jax.Array) -> Any:
        params = models.model(20).init(key, jnp.ones((ROWS, 784)), KEY)["params"]
        return train_state.TrainState.create(
            apply_fn=models.model(20).apply, params=params, tx=optax.adam(1e-3)
        )

    return Brought(
        init,
        lambda state, batch: train.train_step(state, batch, KEY, 20),
        (normal(1, ROWS, 784) > 0).astype(np.float32),
    )


def imagenet(source: Source) -> Brought:
    models, train = map(source.module, ("models", "train"))
    train.NUM_CLASSES = 16
    model = models.ResNet(
        stage_sizes=[1, 1], block_cls=models.ResNetBlock, num_classes=16, num_filters=8
    )
    schedule = optax.linear_schedule(0.1, 0.0, 100)
    config = types.SimpleNamespace(half_precision=False, momentum=0.9)
    return Brought(
        lambda key: train.create_train_state(key, config, model, 32, schedule),
        functools.partial(train.train_step, learning_rate_fn=schedule),
        {"image": normal(1, ROWS, 32, 32, 3), "label": tokens(2, ROWS) % 16},
    )


def sst2(source: Source) -> Brought:
    models, train = map(source.module, ("models", "train"))
    sizes = {"embedding_size": 32, "hidden_size": 32, "vocab_size": VOCAB, "output_size": 1}
    model = models.TextClassifier(**sizes, dropout_rate=0.5, word_dropout_rate=0.1)
    config = types.SimpleNamespace(learning_rate=0.1, momentum=0.9, weight_decay=3e-6)
    batch = {
        "token_ids": tokens(1, ROWS, LENGTH),
        "length": (tokens(2, ROWS) % LENGTH + 1).astype(np.int32),
        "label": (tokens(3, ROWS, 1) % 2).astype(np.float32),
    }
    return Brought(
        lambda key: train.create_train_state(key, config, model),
        lambda state, batch: train.train_step(state, batch, {"dropout": KEY}),
        batch,
    )


def ppo(source: Source) -> Brought:
    models = source.module("models")
    source.module("agent")
    library = source.module("ppo_lib")
    config = types.SimpleNamespace(decaying_lr_and_clip_param=True, learning_rate=2.5e-4)

    def init(key: jax.Array) -> Any:
        model = models.ActorCritic(num_outputs=4)
        params = model.init(key, jnp.ones((1, 84, 84, 4)))["params"]
        return library.create_train_state(params, model, config, 100)

    rows = 2 * ROWS
    states = np.random.default_rng(0).integers(0, 255, (rows, 84, 84, 4)).astype(np.uint8)
    returns = (-np.abs(normal(2, rows)), normal(3, rows), normal(4, rows))

    def step(state: Any, batch: Any) -> Any:
        weights = {"clip_param": 0.1, "vf_coeff": 0.5, "entropy_coeff": 0.01}
        return library.train_step(state, batch, ROWS, **weights)

    return Brought(init, step, (states, tokens(1, rows) % 4, *returns))


def mnist(source: Source) -> Brought:
    train = source.module("train")

    def init(key: jax.Array) -> Any:
        model = train.CNN(nnx.Rngs(key))
        return {
            "model": model,
            "optimizer": nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param),
            "metrics": nnx.MultiMetric(
                accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
            ),
            "rngs": nnx.Rngs(dropout=jax.random.fold_in(key, 1)),
        }

    def step(state: Any, batch: Any) -> Any:
        train.train_step(state["model"], state["optimizer"], state["metrics"], batch, state["rngs"])
        return state

    batch = {"image": normal(1, ROWS, 28, 28, 1), "label": tokens(2, ROWS) % 10}
    return Brought(init, step, batch)


def nanodo(source: Source) -> Brought:
    sys.path.insert(0, str(source.folder.parent))
    from nanodo import loss as losses
    from nanodo import model as models
    from nanodo import optimizer as optimizers

    train = source.module("train")
    sizes = NANODO_SIZES
    schedule = {
        "learning_rate_schedule": "constant",
        "init_learning_rate": 0.0,
        "peak_learning_rate": 0.01,
        "final_learning_rate": 0.0,
        "warmup_steps": 2,
        "num_train_steps": 20,
        "decay_type": "cosine",
    }
    adam = {"weight_decay": 1e-4, "clip_by_global_norm": 1.0, "b1": 0.9, "b2": 0.98, "eps": 1e-9}
    opt = Config(optimizer="adamw", **schedule, **adam)
    config = Config(model=Config(sizes), opt=opt)
    module = models.TransformerDo(models.DoConfig(**sizes, V=VOCAB))

    def init(key: jax.Array) -> Any:
        params = module.init(key, jnp.ones((1, LENGTH), jnp.int32))["params"]
        tx = optimizers.get_optimizer(config.opt)
        return train.TrainState.create(apply_fn=module.apply, params=params, tx=tx)

    step = functools.partial(train._train_step, c=config, get_loss_fn=losses.get_default_loss_fn)
    return Brought(init, step, tokens(1, ROWS, LENGTH))


class Config(dict):
    """A configuration whose keys are fields."""

    __getattr__ = dict.__getitem__


def pairs() -> tuple[np.ndarray, np.ndarray]:
    return normal(1, ROWS, 1), normal(2, ROWS, 1)


def functional(script: Any) -> Brought:
    def init(key: jax.Array) -> Any:
        model = script.MLP(din=1, dhidden=32, dout=1, rngs=nnx.Rngs(key))
        return nnx.split(model, nnx.Param, script.Count)[1:]

    return Brought(init, lambda state, batch: script.train_step(*state, batch), pairs())


def with_state(script: Any) -> Brought:
    def init(key: jax.Array) -> Any:
        model = script.MLP(din=1, dhidden=32, dout=1, rngs=nnx.Rngs(key))
        graph, params, counts = nnx.split(model, nnx.Param, script.Count)
        return script.TrainState.create(
            apply_fn=None, graphdef=graph, params=params, tx=optax.sgd(0.1), counts=counts
        )

    return Brought(init, script.train_step, pairs())


def objects(script: Any) -> Brought:
    """A script that keeps a model and its optimizer, and whose step returns nothing."""

    def init(key: jax.Array) -> Any:
        model = script.MLP(din=1, dhidden=32, dout=1, rngs=nnx.Rngs(key))
        return {"model": model, "opt": nnx.Optimizer(model, optax.sgd(1e-3), wrt=nnx.Param)}

    def step(state: Any, batch: Any) -> Any:
        script.train_step(state["model"], state["opt"], batch)
        return state

    return Brought(init, step, pairs())


def objects_vae(script: Any) -> Brought:
    def init(key: jax.Array) -> Any:
        sizes = {"din": 784, "hidden_size": 64, "latent_size": 16, "output_shape": (28, 28)}
        model = script.VAE(**sizes, rngs=nnx.Rngs(key, noise=1))
        return {"model": model, "opt": nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)}

    def step(state: Any, batch: Any) -> Any:
        return state, script.train_step(state["model"], state["opt"], batch)

    return Brought(init, step, (normal(1, ROWS, 28, 28) > 0).astype(np.float32))


def fsdp(script: Any) -> Brought:
    def init(key: jax.Array) -> Any:
        model = script.MLP(1, 32, 1, rngs=nnx.Rngs(key))
        return {"model": model, "opt": script.SGD(nnx.variables(model, nnx.Param), 0.01, 0.9)}

    def step(state: Any, batch: Any) -> Any:
        return state, script.train_step(state["model"], state["opt"], *batch)

    return Brought(init, step, pairs())


EXAMPLES = (lm1b, wmt, nlp_seq, seq2seq, vae, imagenet, sst2, ppo, mnist, nanodo)
SCRIPTS = (functional, with_state, objects, objects_vae, fsdp)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A row of `tables/brought_programs.yaml`."""

    builder: str
    folder: str
    line: str
    module: str = "train"
    absent: tuple[str, ...] = ()
    names: bool = False
    mapped: str = ""
    marks: bool = True
    double: bool = False

    def source(self, sources: Path, *, marked: bool) -> Source:
        return Source(folder=sources / self.folder, marked=marked, double=self.double)

    def brought(self, sources: Path, *, marked: bool) -> Brought:
        """The program, in float64 where that tells rounding from another result."""
        sys.modules.update({name: Absent(name) for name in self.absent})
        source = self.source(sources, marked=marked)
        jax.config.update("jax_enable_x64", self.double)
        if build := next((one for one in EXAMPLES if one.__name__ == self.builder), None):
            made = build(source)
        else:
            build = next(one for one in SCRIPTS if one.__name__ == self.builder)
            made = build(source.module(self.module, script=True))
        if not self.double:
            return made
        return Brought(lambda key: wide(made.init(key)), made.step, wide(made.batch))


def wide(tree: Any) -> Any:
    """The tree with float64 for float32."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(jnp.float64) if getattr(leaf, "dtype", None) == jnp.float32 else leaf
        ),
        tree,
    )


PROGRAMS = {
    name: Program(**{"builder": name, **row}) for name, row in table("brought_programs").items()
}


def numbers(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree of floating numbers."""
    return [
        np.asarray(leaf, np.float64)
        for leaf in jax.tree.leaves(flax.core.meta.unbox(tree))
        if jnp.issubdtype(leaf.dtype, jnp.number)
    ]


def apart(one: Any, other: Any) -> np.ndarray:
    """How far arrays are apart, each as a part of its largest number."""
    pairs = zip(numbers(one), numbers(other), strict=True)
    return np.array(
        [np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30) for a, b in pairs]
    )


def moved(state: Any) -> Any:
    """A state that differs by half a unit in the last place."""
    signs = np.random.default_rng(0)

    def leaf(one: Any) -> Any:
        if one.dtype not in (jnp.float32, jnp.float64):
            return one
        half = float(jnp.finfo(one.dtype).eps) / 2
        return one * jnp.asarray(1 + signs.choice([-1, 1], one.shape) * half, one.dtype)

    return jax.tree.map(leaf, state)


def alone_in(step: Callable[..., Any], axis: str) -> Callable[..., Any]:
    """A step that is mapped over an axis, on one device."""
    if not axis:
        return step
    mesh = jax.make_mesh((1,), (axis,), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    return jax.shard_map(step, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)


def trained(state: Any, step: Callable[..., Any], batch: Any) -> tuple[Any, Any]:
    metrics: list[Any] = []
    for _ in range(STEPS):
        found = step(state, batch)
        pair = isinstance(found, tuple) and len(found) == 2 and not _alike(found, state)
        state, rest = found if pair else (found, {})
        metrics.append(rest)
    return state, metrics


def _alike(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other)


def measured(name: str, sources: Path) -> dict[str, Any]:
    """One program, under all pins, its loss marked and not."""
    program = PROGRAMS[name]
    sys.meta_path.insert(0, Absence())
    sys.path.insert(0, str(sources / program.folder))
    brought = program.brought(sources, marked=False)
    if not program.source(sources, marked=False).has(program.module, program.line):
        raise SystemExit(f"{name}: {program.module}.py has no line {program.line}")
    with nnx.use_eager_sharding(False):
        leaves = jax.jit(lambda key: jax.tree.leaves(brought.init(key)))
        shapes = jax.eval_shape(brought.init, jax.random.key(0))
        first = jax.tree.structure(shapes).unflatten(leaves(jax.random.key(0)))
    plain = jax.jit(alone_in(brought.step, program.mapped))
    try:
        wanted = trained(first, plain, brought.batch)
    except Exception as error:
        said = str(error).splitlines()[0]
        return {"error": f"fails under jax.jit itself: {type(error).__name__}: {said}"}
    rounding = apart(trained(moved(first), plain, brought.batch), wanted)
    double = any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(first))
    noise = rounding > (NOISE_DOUBLE if double else NOISE)
    rows: dict[str, Any] = {}
    whole: list[str] = []
    for kind, decisions in PINS.items():
        marked = kind != UNMARKED
        if marked and (not program.marks or (whole and "microbatches" in decisions)):
            continue
        run = program.brought(sources, marked=True) if marked else brought
        begin = time.perf_counter()
        compiled = shardlib.compile_step(
            run.init, run.step, run.batch, topology="cpu:8", pin={**MESH, **decisions}
        )
        found = trained(compiled.init(seed=0), compiled.step, run.batch)
        if not compiled.traced.returns_pair:
            found = found[0], wanted[1]
        differences = apart(found, wanted)[~noise]
        whole = [one.message for one in compiled.findings if one.code == "rows-coupled"]
        rows[kind] = {
            "difference": float(differences.max(initial=0)),
            "within": bool(
                differences.max(initial=0) <= max(LIMIT, 10 * rounding[~noise].max(initial=0))
            ),
            "seconds": round(time.perf_counter() - begin, 1),
            "findings": sorted({one.code for one in compiled.findings}),
            **({"not in microbatches": whole} if whole else {}),
        }
    return {
        "lines changed": 1,
        "lines changed, marked": 2 if program.marks else None,
        "line": program.line,
        "names": program.names,
        "arrays": int(noise.size),
        "noise": int(noise.sum()),
        "rounding": float(rounding[~noise].max(initial=0)),
        "runs": rows,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="folder of the sources")
    parser.add_argument("--only", help="one program", choices=PROGRAMS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0, help="that one program may take")
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measured(asked.only, asked.sources)))
        return
    version = f"jax {jax.__version__}, flax {flax.__version__}"
    path = RESULTS / "brought_programs.json"
    for name in [asked.only] if asked.only else PROGRAMS:
        row = apart_from_here(name, asked.sources, asked.seconds)
        kept = stored(path, "programs")
        kept.setdefault(version, {})[name] = row
        write(path, {"source": source_digest("."), "programs": kept}, quiet=True)
        show(name, row, "error", "runs", "rounding")


def apart_from_here(name: str, sources: Path, seconds: float) -> dict[str, Any]:
    """What is measured of a program, in a process of its own."""
    asked = ["--sources", str(sources.absolute()), "--only", name, "--child"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "brought_programs", *asked],
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        said = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"error": (said or ["no message"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])
