"""The programs of the pages run as written, from top to bottom, on eight simulated devices.

What a page takes as given (a model, a batch, a folder) comes from `GIVEN` and from what stands here
before a block. A block that is not run is named with the reason; one that is neither run nor named
fails, and so does a page of which nothing says where it is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shardlib

ROOT = Path(__file__).parents[2]
#: Trainings of pages end after so many steps.
STEPS = 400
#: What pages take as given.
GIVEN = """
import jax, jax.numpy as jnp, numpy as np, optax, shardlib
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from pathlib import Path

def init_arrays(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (8, 16)) / 3, "down": jax.random.normal(down, (16, 8)) / 4}

init = shardlib.tree(init_arrays, {"up": ("embed", "mlp"), "down": ("mlp", "embed")})

def loss(params, batch):
    return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

class Model(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

def model_loss(model, batch):
    return jnp.mean((model.down(nnx.gelu(model.up(batch["x"]))) - batch["y"]) ** 2)

optimizer = optax.adamw(1e-3)
rng = np.random.default_rng(0)
batch = {name: rng.normal(size=(64, 8)).astype(np.float32) for name in ("x", "y")}
rows = {name: value[:24] for name, value in batch.items()}
wide = {name: jax.ShapeDtypeStruct((4096, 8), jnp.float32) for name in ("x", "y")}
"""

#: A small language model, in place of the two matrices.
LANGUAGE = """
from shardlib import models

config = models.TransformerConfig(
    name="small", vocab_size=512, layers=4, embed=64, heads=8, kv_heads=4, head_dim=8, mlp=128,
    max_seq=64,
)
init, loss = models.build(config)
batch = models.example_batch(config, 128, 64)
"""


@dataclass(frozen=True)
class Page:
    """What is done before blocks, by their number, what holds after, and what is not run."""

    before: Mapping[int, str] = field(default_factory=dict)
    unrun: Mapping[int, str] = field(default_factory=dict)
    holds: str = "True"


TPU = "asks the compilers of TPUs, which take minutes"
PAGES = {
    "booking": Page(before={0: "batch = wide"}, holds="found.families and 'h100' in str(found)"),
    "checkpoints": Page(
        before={
            0: """
program = other = other_program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
state, batches = program.init(seed=0), [batch] * 1001
""",
        },
        unrun={1: "needs a folder of weights from the network"},
        holds="restored.step == 1000 and restored.extra == {'position': 1000}",
    ),
    "collective_matmul": Page(
        before={0: LANGUAGE},
        holds="program.plan.decisions['collective_matmul'] == 'loop'",
    ),
    "dropout": Page(
        holds="float(validation['loss']) != float(metrics['loss'])",
    ),
    "flags": Page(
        before={
            0: """
from shardlib.cli.inputs import inputs_of

job = inputs_of("llama2-7b", 256, 2048)
""",
        },
        unrun={1: "asks the compiler of GPUs", 2: "profiles a run on GPUs"},
        holds="plan.compiler_options == {'xla_gpu_all_gather_combine_threshold_bytes': 1 << 27}",
    ),
    "evaluation": Page(
        before={
            0: """
validation_loss = loss
program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
state = program.init(seed=0)
""",
            1: """
cross_entropy = lambda x, y: optax.softmax_cross_entropy(x, y).mean()
accuracy = lambda x, y: jnp.mean(jnp.argmax(x, -1) == jnp.argmax(y, -1))
""",
            2: "batches = [batch, rows]; evaluated = float(metrics['loss'])",
            3: "accuracy_loss = lambda params, rows: (loss(params, rows), {'rows': 1.0})",
        },
        holds="abs(evaluated - float(loss(jax.device_get(state.params), rows))) < 1e-5",
    ),
    "frameworks": Page(
        before={
            1: "assert 'tensor' in plan.emit()",
            2: """
import sys
sys.path.insert(0, ".")
params = init_arrays(jax.random.key(0))
""",
            3: """
import importlib

def step(state, batch):
    value, slopes = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda one, slope: one - 0.1 * slope, state, slopes), {"loss": value}

state = init_arrays(jax.random.key(0))
program = shardlib.compile_step(state, step, batch, topology="cpu:8", abstract=True)
Path("sharded_step.py").write_text(program.plan.emit("jax"))
sharded_step = importlib.reload(sharded_step)
""",
        },
        holds="'sharded_step' in sys.modules and float(metrics['loss']) > 0",
    ),
    "partial_training": Page(
        before={
            1: """
first = program.module(program.init(seed=0))
assert np.array_equal(first.up.kernel[...], model.up.kernel[...])
assert not first.up.lora.lora_b[...].any() and model.up.lora.lora_b[...].any()
assert state.params["up"]["kernel"].addressable_shards[0].data.size == 64 * 256 // 8
""",
            2: "optimizer = optax.adamw(1e-3)",
            3: """
class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs)])

loss = lambda model, batch: jnp.mean((model.layers[0].up(batch["x"]) - batch["y"]) ** 2)
program = shardlib.compile(Model, loss, optimizer, batch, topology="cpu:8", wrt=nnx.LoRAParam)
state = program.init(seed=0)
""",
        },
        holds="any('lora' in name for name in params)",
    ),
    "precision": Page(
        before={
            0: """
state = shardlib.compile(
    init, loss, optimizer, batch, guards=shardlib.Guards(clip=1.0)
).init(seed=0)
""",
        },
        unrun={1: "needs a local disk at /local/nvme"},
        holds="{'gradient_norm', 'skipped'} <= metrics.keys()",
    ),
    "optimizers": Page(holds="program.plan.optimizer_layout == 'owned'"),
    "pins": Page(
        before={
            0: LANGUAGE,
        },
    ),
    "experts": Page(
        before={
            0: """
keys = jax.random.split(jax.random.key(0), 5)
x = jax.random.normal(keys[0], (16, 4, 8))
router = jax.random.normal(keys[1], (8, 8))
up, gate = (jax.random.normal(key, (8, 8, 16)) / 3 for key in keys[2:4])
down = jax.random.normal(keys[4], (8, 16, 8)) / 4
loss = 0.0
""",
            2: """
mesh = jax.make_mesh(
    (1, 8, 1), ("data", "expert", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
)
whole = y
""",
        },
        unrun={1: "needs a model with experts; lowering/test_experts.py runs such programs"},
        holds="y.shape == whole.shape and np.allclose(y, whole, atol=1e-4)",
    ),
    "launching_local": Page(
        before={0: "batch_of = lambda step: batch"},
        holds="Path('runs/a').exists()",
    ),
    "long_context": Page(
        before={
            0: """
query, key, value = (rng.normal(size=(2, 64, 4, 8)).astype(np.float32) for _ in range(3))
segments = documents = np.repeat([[1, 2]], 32, axis=1).repeat(2, axis=0).astype(np.int32)
""",
            2: """
mesh = jax.make_mesh((8,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
head_dim = 8
""",
        },
        unrun={1: "a machine of 512 chips"},
        holds="np.allclose(result, mixed, atol=1e-5)",
    ),
    "islands": Page(
        unrun={1: "runs as two processes in islands/servers/test_docs.py"},
        before={2: "data = lambda step: batch"},
        holds="Path('runs/a').exists()",
    ),
    "verification": Page(unrun={0: TPU, 1: TPU}),
    "training": Page(
        before={
            0: "batch_of = lambda step: batch",
            3: """
x = rng.normal(size=(64, 16)).astype(np.float32)
batch = {"x": x, "y": np.float32(x[:, 0] > 0)}
""",
            4: """
roc = float(metrics["roc"].compute())

class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)

class Larger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(24, 8, rngs=rngs)
        self.up = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)

from shardlib.training.states import with_average

loss = lambda model, batch: jnp.mean(model.up(model.embed(batch["tokens"])) ** 2)
rows = batch = {"tokens": rng.integers(0, 16, (16, 4)).astype(np.int32)}
program = shardlib.compile(Model, loss, with_average(optax.adamw(1e-3), 0.999), batch)
state = program.init(seed=0)
""",
        },
        unrun={1: "needs accounts of WandB and MLflow"},
        holds="0 <= roc <= 1 and state.params['embed']['embedding'].shape == (24, 8)",
    ),
    "pipelines": Page(
        before={
            0: """
class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

def loss(model, batch):
    x = batch["x"]
    for layer in model.layers:
        x = nnx.gelu(layer(x))
    return jnp.mean((x - batch["y"]) ** 2)
""",
            1: "state = program.init(seed=0)",
        },
        holds="'<svg' in Path('step.svg').read_text()",
    ),
    "questions": Page(
        before={
            0: """
batch = wide
plan = shardlib.plan(
    init, loss, optimizer, batch, topology="16*h100:8", pin={"mesh": {"data": 128}}
)

def batch_for(devices):
    return {name: jax.ShapeDtypeStruct((32 * devices, 8), jnp.float32) for name in ("x", "y")}
""",
        },
        holds="change.plan.topology != plan.topology and str(curve)",
    ),
    "folders": Page(
        before={
            2: """
from safetensors.numpy import save_file

program = shardlib.compile(init, loss, optimizer, batch, topology="cpu:8")
Path("folder").mkdir()
given = program.state_dict(program.init(seed=3))
save_file({name: np.asarray(value) for name, value in given.items()}, "folder/a.safetensors")
""",
        },
        unrun={0: "runs in serve/test_folders.py"},
        holds="all(np.array_equal(program.state_dict(state)[name], given[name]) for name in given)",
    ),
    "data": Page(unrun={0: "reads until it is stopped", 1: "needs a bucket of the network"}),
    "requests": Page(
        before={
            0: """
from functools import partial
from shardlib.serve import Engine
from tests.serve.test_own_cache import Linen, Model

Model = partial(Model, room=1024)
module, whole = Linen(), np.zeros((1, 1024), np.int32)
""",
            1: """
from shardlib import serving
from tests.serve.test_drafts import INIT as init, SMALL as small_init, forward

params, small_params = 3, 4  # seeds
""",
            2: """
from dataclasses import replace
from shardlib import models
from tests.serve.hf_folders import write_tokenizer
from tests.serve.test_meshes import DENSE

folder, prompt = Path("tokens"), (65, 66)
write_tokenizer(folder, vocab=300)
init = models.build(replace(DENSE, vocab_size=300))[0]
engine = serving.Engine(init, forward, capacity=serving.Capacity(longest=256))
""",
            3: """
from tests.serve.test_adapters import Model, forward

batch = {"tokens": np.ones((8, 8), np.int32)}
program = shardlib.compile(
    Model, lambda model, batch: model(batch["tokens"]).mean(), optimizer, batch, wrt=nnx.LoRAParam
)
state, params, prompt = program.init(seed=0), 3, (5, 6)
""",
            4: """
class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(47, 16, rngs=rngs), nnx.Linear(16, 47, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.memory = nnx.Variable(jnp.zeros((1, 512, 16)))
        self.seen = nnx.Variable(jnp.ones((1, 512), bool))

    def encoder(self, source, count):
        return self.embed(source)

    def decode(self, tokens, memory, seen):
        x = self.embed(tokens)
        q = x.reshape(*x.shape[:2], 2, 8)
        x = x + shardlib.attention(q, q, q).reshape(x.shape)
        memory = jnp.broadcast_to(memory, (len(tokens), *memory.shape[1:]))
        return self.head(x + self.cross(x, memory, mask=seen[:, None, None]))

engine = serving.Engine(
    Decoder,
    lambda model, tokens: model.decode(tokens, model.memory[...], model.seen[...]),
    capacity=serving.Capacity(longest=64),
)
start, tokens = 1, (4, 5, 6)
""",
        },
        holds="engine.run() is None",
    ),
    "quickstart": Page(
        unrun={1: "an overview, whose calls leave arguments out"},
        holds="float(metrics['loss']) < 1 and program.plan.mesh.devices == 8",
    ),
    "serving": Page(unrun={0: "runs in serve/test_docs.py", 1: TPU}),
    "serving_plans": Page(
        before={
            0: """
from shardlib import models
from tests.serve.test_meshes import forward

config = models.TransformerConfig(
    name="small", vocab_size=512, layers=4, embed=512, heads=16, kv_heads=16, head_dim=32,
    mlp=1024, max_seq=4096,
)
init = models.build(config)[0]
other = shardlib.plan_serving(init, forward, topology="v5e:4x4", prompt=256, output=64)
""",
        },
        unrun={1: TPU},
        holds="plan.topology == 'v5e:16x16'",
    ),
    "steps": Page(
        before={
            1: """
for one, plain in zip(
    jax.tree.leaves((state, metrics)),
    jax.tree.leaves(jax.jit(step)(init(jax.random.key(0)), batch)),
    strict=True,
):
    np.testing.assert_allclose(one, plain, atol=1e-5)
""",
            2: """
nll = optax.softmax_cross_entropy_with_integer_labels

def init(key):
    params = {"embed": jax.random.normal(key, (64, 16)), "head": jnp.ones((16, 64))}
    return {"params": params, "opt": optimizer.init(params)}

def forward(params, ids):
    return params["embed"][ids] @ params["head"]

batch = {"ids": np.ones((32, 16), np.int32)}
""",
        },
        holds="program.plan.microbatches == 4",
    ),
}
#: Pages whose programs run in a test of their own.
ELSEWHERE = {
    "coming_from": "docs/test_how_to.py",
    "does_not_fit": "docs/test_how_to.py",
    "it_is_slow": "docs/test_how_to.py",
    "why": "diagnosis/test_causes.py",
    "your_model": "annotation/test_your_model.py",
    "server": "serve/http/test_docs.py",
    "parameter_server": "islands/servers/test_docs.py",
    "federated": "islands/federated/test_simulation.py",
}
#: Searches and kernels of several seconds.
LONG = {"booking", "collective_matmul", "experts", "long_context", "pins", "requests"}


def programs(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)


def test_every_page_with_programs_is_accounted_for():
    found = {page.stem for page in (ROOT / "docs").glob("*.md") if programs(page.stem)}
    assert found == PAGES.keys() | ELSEWHERE.keys()
    assert all(max(told.unrun, default=0) < len(programs(page)) for page, told in PAGES.items())
    for page, test in ELSEWHERE.items():
        assert f"{page}.md" in (ROOT / "tests" / test).read_text()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if page in LONG else [])
        for page in PAGES
        if len(PAGES[page].unrun) < len(programs(page))
    ],
)
def test_the_programs_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    told, blocks = PAGES[page], programs(page)
    assert {*told.before, *told.unrun} <= set(range(len(blocks)))
    scope: dict[str, Any] = {"__name__": "page"}
    exec(GIVEN, scope)
    fit = shardlib.fit
    monkeypatch.setattr(
        shardlib, "fit", lambda *args, steps, **more: fit(*args, steps=min(steps, STEPS), **more)
    )
    for number, block in enumerate(blocks):
        if number not in told.unrun:
            exec(compile(told.before.get(number, ""), "given", "exec"), scope)
            exec(compile(block, f"{page}.md block {number}", "exec"), scope)
    assert eval(told.holds, scope)
