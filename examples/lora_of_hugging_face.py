"""A model of a Hugging Face folder learns something new with adapters (LoRA), which are written in
the format of PEFT.

python examples/lora_of_hugging_face.py                                # makes a small folder first
python examples/lora_of_hugging_face.py --topology v5e:16x16 --folder somewhere

The folder that is made counts by one; the adapters teach it to count by three. Of your own folder,
write the model in Flax, as here, with the sizes of its `config.json`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # where there are no accelerators

import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

import shardlib
from shardlib.checkpointing.foreign import learn_names, read_weights, tensors_of, write_adapter
from shardlib.training.states import operate

VOCAB, WIDE, HIDDEN, HEADS, LAYERS, RANK, ROWS, SEQ = 61, 64, 192, 4, 2, 4, 64, 24


class Layer(nnx.Module):
    def __init__(self, linear, rngs: nnx.Rngs):
        self.input_norm, self.mlp_norm = (nnx.RMSNorm(WIDE, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v, self.o = (linear(WIDE, WIDE, rngs) for _ in range(4))
        self.up, self.down = linear(WIDE, HIDDEN, rngs), linear(HIDDEN, WIDE, rngs)

    def __call__(self, x):
        y = self.input_norm(x)
        heads = (part(y).reshape(*y.shape[:2], HEADS, -1) for part in (self.q, self.k, self.v))
        x = x + self.o(shardlib.attention(*heads).reshape(y.shape))
        return x + self.down(nnx.silu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, linear, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDE, rngs=rngs)
        self.layers = nnx.List([Layer(linear, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDE, rngs=rngs)
        self.head = nnx.Linear(WIDE, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def base(rngs):
    """The model as it stands in the folder."""
    return Decoder(lambda n, m, rngs: nnx.Linear(n, m, use_bias=False, rngs=rngs), rngs)


def adapted(rngs):
    """The same with an adapter beside every matrix of its layers."""
    return Decoder(
        lambda n, m, rngs: nnx.LoRALinear(n, m, lora_rank=RANK, use_bias=False, rngs=rngs), rngs
    )


#: Our modules in a layer, and what the folder calls them.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    targets = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def rows(number, by):
    """Counting from anywhere."""
    start = np.random.default_rng(number).integers(0, VOCAB, (ROWS, 1))
    return {"tokens": ((start + by * np.arange(SEQ + 1)) % VOCAB).astype(np.int32)}


def trained(program, state, steps, by):
    """The state after some steps, and the losses."""
    losses = []
    for number in range(steps):
        state, metrics = program.step(state, rows(number, by))
        losses.append(float(metrics["loss"]))
    return state, losses


def make_folder(folder, steps):
    """What somebody else has trained, as Hugging Face keeps it: matrices [out, in]."""
    program = shardlib.compile(base, loss, optax.adam(3e-3), rows(0, 1), topology="cpu:1")
    state, losses = trained(program, program.init(seed=0), steps, by=1)
    model = program.module(state)
    tensors = {
        "model.embed_tokens.weight": model.embed.embedding[...],
        "model.norm.weight": model.norm.scale[...],
        "lm_head.weight": model.head.kernel[...].T,
    }
    for number, layer in enumerate(model.layers):
        start = f"model.layers.{number}."
        tensors[f"{start}input_layernorm.weight"] = layer.input_norm.scale[...]
        tensors[f"{start}post_attention_layernorm.weight"] = layer.mlp_norm.scale[...]
        for ours, theirs in MODULES.items():
            tensors[f"{start}{theirs}.weight"] = getattr(layer, ours).kernel[...].T
    save_file(
        {name: np.ascontiguousarray(one) for name, one in tensors.items()},
        Path(folder, "model.safetensors"),
    )
    print(f"made {folder}: counts by one with a loss of {losses[-1]:.3f}")


def teach(folder, topology, steps):
    """Trains adapters of a folder's model, and writes them to `adapter` in it; returns the model
    with them, and the losses before and after.
    """
    optimizer, batch = optax.adam(1e-2), rows(0, 3)

    # the folder's tensors, where a plan of the plain model has them
    plain = shardlib.compile(base, loss, optimizer, batch, topology=topology)
    given = {
        "layers.#.input_norm.scale": "model.layers.#.input_layernorm.weight",
        "layers.#.mlp_norm.scale": "model.layers.#.post_attention_layernorm.weight",
    }
    names = learn_names(plain.state.params, tensors_of(folder), expected_names=given)
    print(names)
    state = read_weights(folder, plain, names)
    print(f"counts by one: loss {float(plain.evaluate(state, rows(10**6, 1))['loss']):.3f}")

    # the same with adapters: another model, with a plan of its own, that trains these alone
    program = shardlib.compile(
        adapted, loss, optimizer, batch, topology=topology, wrt=nnx.LoRAParam
    )
    print(program.plan.explain().split("\n\n")[0])
    state = operate(program, state).state(seed=0)
    state, losses = trained(program, state, steps, by=3)
    after = float(program.evaluate(state, rows(10**6, 3))["loss"])
    print(f"counts by three: loss {losses[0]:.3f} before, {after:.3f} after {steps} steps")

    theirs = {
        f"layers.{number}.{ours}": f"model.layers.{number}.{name}"
        for number in range(LAYERS)
        for ours, name in MODULES.items()
    }
    write_adapter(Path(folder, "adapter"), state.params, theirs, task="CAUSAL_LM")
    print(f"wrote {folder}/adapter, which PEFT reads")
    return program.module(state), [losses[0], after]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains the adapters, and returns the loss before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="cpu:8")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", help="with safetensors; by default a small one is made")
    asked = parser.parse_args(arguments)
    folder = asked.folder or tempfile.mkdtemp()
    if asked.folder is None:
        make_folder(folder, asked.steps)
    return teach(folder, asked.topology, asked.steps)[1]


if __name__ == "__main__":
    main()
