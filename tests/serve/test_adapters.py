"""Several adapters at once over one base answer as models do into which they are merged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import shardlib
from shardlib import serve as serving
from shardlib.annotation.model import read
from shardlib.errors import ArgumentError, MissingFileError, ModelError
from shardlib.serve.engine import Engine
from shardlib.serve.folders import adapted, read_adapter
from shardlib.serve.hosting import Companions, Deployment, Embedder, Renderer, Worker
from shardlib.serve.http.app import application
from shardlib.serve.http.app import serving as serve
from shardlib.serve.requests import Capacity, GenerationRequest, Request, Sampling, Storage
from tests.models.configs import tiny
from tests.serve.hf_folders import write_adapter, write_folder
from tests.serve.test_folders import GOLDEN

VOCAB, WIDTH, RANK, LONGEST = 53, 16, 3, 32
SIZES = Capacity(longest=LONGEST, slots=4, page=4, pages=40, budget=12, adapters=3)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        names = {"kernel_metadata": {"out_sharding": ("embed", "heads")}, "rngs": rngs}
        self.qkv = nnx.LoRALinear(WIDTH, 3 * WIDTH, lora_rank=RANK, **names)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(self.qkv(x).reshape(*x.shape[:2], 6, WIDTH // 2), 3, axis=2)
        return x + self.out(shardlib.attention(q, k, v).reshape(x.shape))


class Model(nnx.Module):
    """Adapted in its layers, and after them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.LoRALinear(WIDTH, VOCAB, lora_rank=RANK, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + jnp.sin(jnp.arange(tokens.shape[1], dtype=jnp.float32))[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def forward(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def adapter(seed: int) -> dict[str, np.ndarray]:
    """Arrays of an adapter by dotted path, as large as the weights that they change."""
    draw, model = np.random.default_rng(seed), read(Model)
    paths = {
        shardlib.annotation.names.path_text(path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    }
    return {
        path: draw.normal(size=shape).astype(np.float32) * 0.6
        for path, shape in paths.items()
        if "lora" in path
    }


def merged(parts: dict[str, np.ndarray] | None) -> Any:
    """Weights of the model without adapters: W + A B in place of W, and A and B are nothing."""
    params, state = read(Model).init(0)
    given = {} if parts is None else parts

    def new(path: Any, leaf: jax.Array) -> jax.Array:
        name = shardlib.annotation.names.path_text(path)
        if "lora" in name:
            return leaf if parts is None else jnp.zeros_like(leaf)
        a, b = (name.replace("kernel", f"lora.lora_{part}") for part in "ab")
        return leaf + given[a] @ given[b] if a in given else leaf

    return jax.tree_util.tree_map_with_path(new, params), state


def asked(number: int) -> GenerationRequest:
    draw = np.random.default_rng(number)
    return GenerationRequest(
        prompt=(5, 2, 7, 5, 2, *draw.integers(0, VOCAB, int(draw.integers(1, 8))).tolist()),
        most=int(draw.integers(3, 12)),
        adapter=("", "a", "b", "c")[number % 4],
        sampling=Sampling(temperature=0.5 * (number % 2), seed=number),
        scored=number == 5,
    )


@pytest.fixture(scope="module")
def right() -> list[Request]:
    """Each request by an engine of weights into which its adapter is merged."""
    found: dict[int, Request] = {}
    for at, seed in enumerate((None, 1, 2, 3)):
        weights = merged(None if seed is None else adapter(seed))
        engine = Engine(Model, forward, weights=weights, capacity=replace(SIZES, adapters=0))
        for number in range(at, 14, 4):
            found[number] = engine.add(replace(asked(number), adapter=""))
        engine.run()
    return [found[number] for number in range(14)]


@pytest.mark.long
@pytest.mark.matrix
@pytest.mark.parametrize(("drafts", "tensor", "data"), [(0, 1, 1), (2, 1, 1), (0, 2, 1), (2, 2, 2)])
def test_answers_are_those_of_merged_weights(
    right: list[Request], drafts: int, tensor: int, data: int
):
    sizes = replace(SIZES, drafts=drafts)
    engine = Engine(Model, forward, capacity=sizes, tensor=tensor, data=data, check=tensor == 1)
    for name, seed in (("a", 1), ("b", 2), ("c", 3)):
        engine.adapt(name, adapter(seed))
    engine.warm_up()
    compiled = engine.compute.compiled
    for _ in range(2):  # the second time over pages that are kept, of each adapter its own
        requests = [engine.add(asked(number)) for number in range(14)]
        engine.run()
        for found, other in zip(requests, right, strict=True):
            assert found.answer == other.answer
            assert found.logprobs == pytest.approx(other.logprobs, abs=2e-4)
            assert [one.logprob for one in found.scores] == pytest.approx(
                [one.logprob for one in other.scores], abs=2e-4
            )
        assert len({tuple(one.answer[:3]) for one in requests}) > 4
    assert engine.compute.compiled == compiled
    assert engine.schedule.pool.available == data * sizes.all_pages


@pytest.mark.long
def test_adapters_come_while_others_are_served(right: list[Request]):
    engine = Engine(Model, forward, capacity=SIZES, check=False)
    engine.adapt("a", adapter(3))
    first = engine.add(asked(3 - 2))
    with pytest.raises(ArgumentError, match="requests use the adapter 'a'"):
        engine.adapt("a", adapter(1))
    engine.run()
    assert first.answer != right[1].answer
    engine.adapt("a", adapter(1))  # another one under the name: pages of the old are not its own
    base = engine.add(asked(0))
    engine.step()
    engine.adapt("b", adapter(2))
    others = [engine.add(asked(number)) for number in (1, 2)]
    engine.run()
    assert [one.answer for one in (base, *others)] == [right[n].answer for n in range(3)]
    module = read(Model).rebuild(*merged(None))  # as training leaves it; here it changes nothing
    engine.adapt("c", nnx.to_pure_dict(nnx.state(module, nnx.LoRAParam)))
    same = engine.add(replace(asked(0), adapter="c"))
    engine.run()
    assert same.answer == right[0].answer
    engine.replace(merged(None))
    again = engine.add(asked(1))
    engine.run()
    assert again.answer == right[1].answer


def test_adapters_that_do_not_fit_are_refused():
    engine = Engine(Model, forward, capacity=replace(SIZES, adapters=1), check=False)
    parts = adapter(1)
    with pytest.raises(ArgumentError, match="no adapter 'a'; there are none"):
        engine.add(replace(asked(0), adapter="a"))
    with pytest.raises(ArgumentError, match=r"the model has no parameter head\.lora\.nothing"):
        engine.adapt("a", {**parts, "head.lora.nothing": np.zeros(3)})
    with pytest.raises(ArgumentError, match=r"head\.lora\.lora_a is \[2\]; that of the model is"):
        engine.adapt("a", {"head.lora.lora_a": np.zeros(2)})
    with pytest.raises(ArgumentError, match="it has no parameters"):
        engine.adapt("a", {})
    engine.adapt("a", {"head": {"lora": {"lora_a": parts["head.lora.lora_a"]}}})
    with pytest.raises(ArgumentError, match="there is room for 1"):
        engine.adapt("b", parts)
    with pytest.raises(ArgumentError, match="other parameters than the adapters that are there"):
        engine.adapt("a", parts)


def test_texts_are_embedded_by_the_base():
    engine = Engine(Model, forward, capacity=SIZES)
    embedder = Embedder(engine, lambda model, tokens: model.embed(tokens))
    embedder.warm_up()
    before = embedder([3, 1, 4])
    engine.adapt("a", adapter(1))
    np.testing.assert_array_equal(embedder([3, 1, 4]), before)
    embedder.warm_up()
    np.testing.assert_array_equal(embedder([3, 1, 4]), before)


def test_weights_in_eight_bits_have_no_adapters():
    sizes = Capacity(longest=16, adapters=1, storage=Storage(weights="int8"))
    with pytest.raises(ArgumentError, match=r"weights are int8, and those of adapters are not"):
        Engine(Model, forward, capacity=sizes)


# Adapters of PEFT are served with the tokens that PEFT says.

SMALL = serving.Capacity(longest=32, slots=3, page=4, adapters=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, and its adapters."""
    found = tmp_path_factory.mktemp("peft")
    write_folder(found / "base", tiny("llama-3.1-8b"), "llama-3.1-8b")
    for name, how in GOLDEN["adapters"].items():
        about = {key: value for key, value in how.items() if key != "tokens"}
        write_adapter(found / name, found / "base", name, about)
    return found


@pytest.mark.long
def test_tokens_are_those_of_peft_and_adapters_are_models_of_the_server(home: Path):
    import httpx2

    base = serving.read_folder(home / "base", dtype="float32")
    served, adapters = adapted(base, home / "base", {name: home / name for name in "ab"})
    engine = served.engine(SMALL)
    Companions(adapters=adapters).join(engine)
    prompts, most = GOLDEN["prompts"], GOLDEN["most"]
    asked = {
        name: [
            engine.add(serving.GenerationRequest(prompt=tuple(prompt), most=most, adapter=name))
            for prompt in prompts
        ]
        for name in ("a", "b", "")
    }
    engine.run()
    for name in "ab":
        assert [one.answer for one in asked[name]] == GOLDEN["adapters"][name]["tokens"]
    assert [one.answer for one in asked[""]] == GOLDEN["tokens"]["llama-3.1-8b"]
    deployed = Deployment(
        name="base",
        served=served,
        worker=Worker(engine),
        renderer=Renderer(served.text),
        adapters=tuple(adapters),
    )
    with serve(application([deployed])) as url, httpx2.Client(base_url=f"{url}/v1") as client:
        listed = client.get("/models").json()["data"]
        assert [(one["id"], one["parent"]) for one in listed] == [
            ("base", None),
            ("a", "base"),
            ("b", "base"),
        ]
        body = {"prompt": prompts[0], "max_tokens": most, "temperature": 0, "ignore_eos": True}
        for name in ("base", "a", "b"):
            found = client.post("/completions", json={**body, "model": name}, timeout=60).json()
            right = asked["" if name == "base" else name][0].answer
            assert found["model"] == name
            assert found["choices"][0]["text"] == served.text.decode(right)
        wrong = client.post("/embeddings", json={"input": "a", "model": "a"})
        assert wrong.status_code == 400 and "a is an adapter" in wrong.text
        assert client.post("/completions", json={**body, "model": "c"}).status_code == 404
    with pytest.raises(ArgumentError, match="each has a name of its own"):
        application([Deployment(**{**vars(deployed), "adapters": ("base",)})])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; 'LORA' is served"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern is"),
        ({"r": 0}, "r is 0; it is a whole number above 0"),
        ({"r": 2}, "is not an adapter of rank 2"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    home: Path, tmp_path: Path, about: dict[str, Any], said: str
):
    config = json.loads((home / "a" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **about}))
    save_file(
        load_file(home / "a" / "adapter_model.safetensors"),
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(ModelError, match=said):
        read_adapter(tmp_path)


def test_adapters_of_another_model_are_refused(home: Path, tmp_path: Path):
    tensors = load_file(home / "a" / "adapter_model.safetensors")
    start = "base_model.model.model.layers.0.self_attn"
    wider = {**tensors, f"{start}.q_proj.lora_B.weight": np.zeros((7, 3), np.float32)}
    other = {
        **tensors,
        f"{start}.r_proj.lora_A.weight": np.zeros((3, 4), np.float32),
        f"{start}.r_proj.lora_B.weight": np.zeros((4, 3), np.float32),
    }
    base = serving.read_folder(home / "base", dtype="float32")
    for held, said in ((wider, "q_proj is .7, "), (other, "r_proj has no adapter in the model")):
        config = (home / "a" / "adapter_config.json").read_text()
        (tmp_path / "adapter_config.json").write_text(config)
        save_file(held, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"the adapter 'x' does not fit.*{said}"):
            adapted(base, home / "base", {"x": tmp_path})
    with pytest.raises(MissingFileError, match=r"has no adapter_config\.json"):
        read_adapter(home)
