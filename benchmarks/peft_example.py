"""The adapter that `examples/lora_of_hugging_face.py` writes, read by PEFT: a PyTorch model of the
same folder gives the logits of the trained Flax model.

    python -m benchmarks peft_example --torch PYTHON --out benchmarks/results/peft_example.json

PYTHON has torch, transformers, peft and safetensors; it runs in a process of its own, and sees the
folder and some tokens alone.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.environment import command_line, simulate_devices, write

#: The example's model in PyTorch, under the names of its folder, with the adapter or without.
OTHER = """
import json, sys, torch, peft, transformers
from pathlib import Path
from torch import nn
from safetensors.torch import load_file, save_file

folder, sizes = Path(sys.argv[1]), json.loads(sys.argv[2])
vocab, wide, hidden, heads, layers = sizes

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(wide, wide, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(wide, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, wide, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(wide, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(wide, eps=1e-6)
        self.self_attn, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, wide)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(wide, eps=1e-6)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Model(), nn.Linear(wide, vocab, bias=False)
        self.config = transformers.PretrainedConfig()

    def forward(self, input_ids, **_):
        return self.lm_head(self.model(input_ids))

    def prepare_inputs_for_generation(self, *_, **__):  # PEFT asks for it, and nobody calls it
        raise NotImplementedError

net = Decoder()
net.load_state_dict(load_file(folder / "model.safetensors"))
tokens = load_file(folder / "tokens.safetensors")["tokens"].long()
with torch.no_grad():
    found = {"base": net(tokens)}
    model = peft.PeftModel.from_pretrained(net, folder / "adapter").eval()
    found["adapted"] = model(tokens)
    found["merged"] = model.merge_and_unload()(tokens)
save_file({name: one.contiguous() for name, one in found.items()}, folder / "logits.safetensors")
print(json.dumps({"torch": torch.__version__, "peft": peft.__version__}))
"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--torch", required=True, help="a Python with torch and peft")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, help="store the figures")
    options = parser.parse_args()
    simulate_devices(8)

    import jax
    import numpy as np
    from safetensors.numpy import load_file, save_file

    from examples import lora_of_hugging_face as example

    with tempfile.TemporaryDirectory() as place, jax.default_matmul_precision("highest"):
        example.make_folder(place, options.steps)
        model, losses = example.teach(place, "cpu:8", options.steps)
        tokens = example.rows(10**6, 3)["tokens"][:, :-1]
        ours = np.asarray(model(tokens))
        save_file({"tokens": np.ascontiguousarray(tokens)}, Path(place, "tokens.safetensors"))
        sizes = [example.VOCAB, example.WIDE, example.HIDDEN, example.HEADS, example.LAYERS]
        run = [options.torch, "-c", OTHER, place, json.dumps(sizes)]
        out = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
        theirs = load_file(Path(place, "logits.safetensors"))
    figures = {
        "theirs": json.loads(out.splitlines()[-1]),
        "steps": options.steps,
        "loss": {"before": losses[0], "after": losses[1]},
        "largest difference of a logit, relative to the largest logit": {
            name: float(np.abs(one - ours).max() / np.abs(ours).max())
            for name, one in theirs.items()
        },
    }
    print(json.dumps(figures, indent=1))
    if options.out is not None:
        write(options.out, figures)
