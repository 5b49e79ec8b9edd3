"""LoRA adapters to PEFT and back: a Flax model and a PyTorch one with the same base weights give
the same numbers under adapters that either library has written.

    python -m benchmarks peft_adapters --torch PYTHON --out benchmarks/results/peft_adapters.json

PYTHON has torch, peft and safetensors; it runs in a process of its own. Base weights go over as
safetensors, and come back by learned names.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.environment import command_line

INNER, OUTER, RANK, ROWS = 12, 20, 3, 7

#: What the other Python does: a model of two layers; reads our adapter, and makes one of its own.
OTHER = f"""
import json, sys, torch, peft
from pathlib import Path
from safetensors.torch import load_file, save_file

folder = Path(sys.argv[1])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = torch.nn.Linear({INNER}, {OUTER}), torch.nn.Linear({OUTER}, {INNER})

    def forward(self, x):
        return self.down_proj(torch.tanh(self.up_proj(x)))

torch.manual_seed(0)
net = Net()
if (folder / "base.safetensors").exists():
    net.load_state_dict(load_file(folder / "base.safetensors"))
x = load_file(folder / "x.safetensors")["x"]
if sys.argv[2] == "make":
    save_file(net.state_dict(), folder / "base.safetensors")
    config = peft.LoraConfig(r={RANK}, lora_alpha=8, target_modules=["up_proj", "down_proj"], init_lora_weights=False, use_rslora=sys.argv[3] == "rslora")
    model = peft.get_peft_model(net, config)
    model.save_pretrained(folder / f"theirs-{{sys.argv[3]}}")
else:
    model = peft.PeftModel.from_pretrained(net, folder / "ours")
model.eval()
save_file({{"y": model(x).detach()}}, folder / f"{{sys.argv[2]}}-{{sys.argv[3]}}.safetensors")
print(json.dumps({{"torch": torch.__version__, "peft": peft.__version__}}))
"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--torch", required=True, help="a Python with torch and peft")
    parser.add_argument("--out", type=Path, help="store the figures")
    options = parser.parse_args()

    import jax
    import numpy as np
    from flax import nnx
    from safetensors.numpy import load_file, save_file

    from shardlib.checkpointing.foreign import (
        in_form,
        learn_names,
        read_adapter,
        tensors_of,
        write_adapter,
    )

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.LoRALinear(INNER, OUTER, lora_rank=RANK, rngs=rngs)
            self.down = nnx.LoRALinear(OUTER, INNER, lora_rank=RANK, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.down(jax.numpy.tanh(self.up(x)))

    modules = {"up": "up_proj", "down": "down_proj"}
    figures: dict[str, object] = {"jax": jax.__version__}
    with tempfile.TemporaryDirectory() as place, jax.default_matmul_precision("highest"):
        folder = Path(place)
        x = np.random.default_rng(0).normal(size=(ROWS, INNER)).astype(np.float32)
        save_file({"x": x}, folder / "x.safetensors")

        def other(*words: str) -> np.ndarray:
            run = [options.torch, "-c", OTHER, place, *words]
            out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
            figures.update(json.loads(out.splitlines()[-1]))
            return load_file(folder / f"{words[0]}-{words[1]}.safetensors")["y"]

        def difference(model: Net, wanted: np.ndarray) -> float:
            return float(np.abs(np.asarray(model(x)) - wanted).max() / np.abs(wanted).max())

        def based(seed: int) -> Net:
            """Ours with their base weights, by learned names, and adapters of its own."""
            model = Net(nnx.Rngs(seed))
            state = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
            plain = nnx.to_pure_dict(state)
            file = folder / "base.safetensors"
            names = learn_names(plain, tensors_of(file))
            names.require()
            tensors = load_file(file)
            for path, source in names.sources.items():
                module, leaf = path.split(".")
                shape = plain[module][leaf].shape
                plain[module][leaf] = in_form(tensors[source.names[0]], source.form, shape)
            nnx.replace_by_pure_dict(state, plain)
            nnx.update(model, state)
            return model

        for kind in ("plain", "rslora"):
            wanted = other("make", kind)
            model = based(1)
            adapters = nnx.state(model, nnx.LoRAParam)
            plain = nnx.to_pure_dict(adapters)
            for path, array in read_adapter(folder / f"theirs-{kind}", modules).items():
                module, lora, leaf = path.split(".")
                plain[module][lora][leaf] = array
            nnx.replace_by_pure_dict(adapters, plain)
            nnx.update(model, adapters)
            figures[f"theirs read here, {kind}"] = difference(model, wanted)
        model = based(2)
        for module in (model.up, model.down):
            noise = jax.random.normal(jax.random.key(3), module.lora.lora_b.shape)
            module.lora.lora_b[...] = noise
        write_adapter(folder / "ours", nnx.to_pure_dict(nnx.state(model)), modules)
        figures["ours read there"] = difference(model, other("read", "ours"))
    print(json.dumps(figures, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
