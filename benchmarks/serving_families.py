"""Tokens of a served folder beside those of `transformers`, for every Hugging Face family that is
imported.

    python -m benchmarks serving_families [--write] [--out FILE]

`transformers` builds each model with small random weights in float32 on a CPU, saves it, and continues some prompts greedily; `read_folder` reads
the same folder and its engine answers all prompts together. It needs torch, transformers and peft beside
shardlib. `--write` stores the tokens of `transformers` for tests/serve/test_folders.py, which
draws the same weights.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from benchmarks.environment import ROOT, card, command_line, show, table, write
from shardlib import models
from shardlib.annotation.model import read
from shardlib.checkpointing.huggingface import save_weights
from shardlib.models.config import Experts, LatentAttention, TransformerConfig
from shardlib.models.presets import described
from shardlib.serve.folders import adapted, read_folder, write_folder
from shardlib.serve.requests import Capacity, GenerationRequest
from shardlib.serve.served import ByteText, Served
from tests.models.configs import PUBLISHED, tiny
from tests.serve.hf_folders import write_tokenizer

GOLDEN = ROOT / "tests" / "serve" / "transformers_tokens.json"
PROMPTS = ([5, 2, 7, 11, 60, 3, 9], [1], [33, 33, 12, 8, 4, 19, 21, 2, 40, 41, 5])
MOST = 18
_TABLE = table("serving_families")
SOME_WINDOWS, ADAPTERS, WRITTEN = (_TABLE[name] for name in ("windows", "adapters", "written"))


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that follow from a tensor's name, as tests/checkpointing/test_huggingface.py has
    them.
    """
    random = np.random.default_rng(zlib.crc32(name.encode()))
    centre, spread = (1.0, 0.1) if len(shape) == 1 and "norm" in name else (0.0, 0.25)
    return random.normal(centre, spread, shape).astype(np.float32)


def made(config: dict[str, Any], folder: Path) -> None:
    """A folder as `transformers` writes it, with the weights of this file."""
    data = dict(config)
    family = data.pop("model_type")
    family = "gemma3_text" if family == "gemma3" else family
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **data), torch_dtype=torch.float32
    )
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    drawn = {name: weights(name, one.shape) for name, one in load_file(file).items()}
    save_file(drawn, file, metadata={"format": "pt"})


def theirs(folder: Path) -> list[list[int]]:
    """What `transformers` says, prompt by prompt."""
    return answers(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    )


def answers(model: Any) -> list[list[int]]:
    """What a model of `transformers` says, prompt by prompt."""
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        whole = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=MOST,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(whole[0, len(prompt) :].tolist())
    return found


def ours(folder: Path, windows: int = 0) -> list[list[int]]:
    """What the engine says, all prompts at once; of a number of windows, with as many cache groups."""
    write_tokenizer(folder, 300)
    found = read_folder(folder, dtype="float32")
    engine = found.engine(Capacity(longest=32, slots=3, page=4))
    assert windows in (0, len(engine.capacity.groups)), engine.capacity.groups
    return engine.generate(PROMPTS, most=MOST)


def compared(right: list[list[int]], found: list[list[int]]) -> dict[str, Any]:
    """Whether answers are equal, and how many tokens and different tokens they have."""
    tokens = [token for answer in right for token in answer]
    return {"equal": right == found, "tokens": len(tokens), "different_tokens": len({*tokens})}


def windowed(name: str, folder: Path) -> dict[str, Any]:
    """A model of which some layers have a window and some have none."""
    made({**tiny(name), **SOME_WINDOWS[name]}, folder)
    right, found = theirs(folder), ours(folder, windows=2)
    return {"model": name, "changed": SOME_WINDOWS[name], **compared(right, found)}


def peft_tokens(folder: Path) -> dict[str, list[list[int]]]:
    """What PEFT says with each adapter of a small Llama; its folders stay in `folder`."""
    import peft

    made(tiny("llama-3.1-8b"), folder / "base")
    found = dict[str, list[list[int]]]()
    for name, how in ADAPTERS.items():
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32
        )
        config = peft.LoraConfig(task_type="CAUSAL_LM", **how)
        peft.get_peft_model(base, config).save_pretrained(folder / name)
        file = folder / name / "adapter_model.safetensors"
        drawn = {key: weights(f"{name} {key}", one.shape) for key, one in load_file(file).items()}
        save_file(drawn, file, metadata={"format": "pt"})
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "base", dtype=torch.float32
        )
        found[name] = answers(peft.PeftModel.from_pretrained(base, folder / name).eval())
    return found


def served_adapters(folder: Path) -> dict[str, list[list[int]]]:
    """What the engine says with each adapter, all requests at once."""
    write_tokenizer(folder / "base", 300)
    base = read_folder(folder / "base", dtype="float32")
    places = {name: folder / name for name in ADAPTERS}
    served, adapters = adapted(base, folder / "base", places)
    engine = served.engine(Capacity(longest=32, slots=3, page=4, adapters=len(adapters)))
    for name, params in adapters.items():
        engine.adapt(name, params)
    asked = {
        name: [
            engine.add(GenerationRequest(prompt=tuple(prompt), most=MOST, adapter=name))
            for prompt in PROMPTS
        ]
        for name in ADAPTERS
    }
    engine.run()
    return {name: [one.answer for one in requests] for name, requests in asked.items()}


def changed(changes: dict[str, Any]) -> TransformerConfig:
    """A small transformer with some changes."""
    kinds = {"experts": Experts, "latent": LatentAttention}
    made = {key: kinds[key](**value) for key, value in changes.items() if key in kinds}
    return replace(card("small"), **changes | made)


def written(family: str, folder: Path) -> dict[str, Any]:
    """A transformer of ours with random weights: its tokens, and those of `transformers`, which
    loads what is written of it.
    """
    config = changed(WRITTEN[family])
    served = Served(
        name=family,
        init=models.build(config)[0],
        forward=lambda model, tokens: model(tokens),
        weights=3,
        longest=config.max_seq,
        text=ByteText(),
        config=config,
    )
    write_folder(served, folder)
    found = served.engine(Capacity(longest=32, slots=3, page=4)).generate(PROMPTS, most=MOST)
    data = json.loads((folder / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    same_text = tokenizer("größer {7}")["input_ids"] == served.text.encode("größer {7}")
    right = theirs(folder)
    return {
        "model_type": data["model_type"],
        "as_wanted": data["model_type"] == family,
        **compared(right, found),
        "same_text": same_text,
    }


def written_switch(name: str, folder: Path) -> dict[str, Any]:
    """A small Switch transformer with random weights: its tokens, by its forward pass alone, and
    those of `transformers`, which loads what is written of it.
    """
    config = models.EncoderDecoderConfig(
        name=name,
        vocab_size=64,
        encoder_layers=4,
        decoder_layers=4,
        embed=32,
        heads=4,
        head_dim=8,
        mlp=48,
        max_seq=64,
        buckets=8,
        max_distance=16,
        experts=Experts(count=4, per_token=1, mlp=48, normalise=False, sequence_capacity=64),
        compute_dtype="float32",
    )
    model = read(models.build(config)[0])
    weights = jax.jit(model.init)(3)
    save_weights(weights, folder, described(config))
    ours = jax.jit(model.rebuild(*weights).__call__)
    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None
    right, found = list[list[int]](), list[list[int]]()
    for prompt in PROMPTS:
        whole = peer.generate(
            torch.tensor([prompt]), max_new_tokens=MOST, do_sample=False, pad_token_id=0
        )
        right.append(whole[0, 1:].tolist())
        said = np.zeros((1, MOST + 1), np.int32)
        for at in range(MOST):
            logits = ours(np.asarray([prompt]), said)
            said[0, at + 1] = int(np.argmax(np.asarray(logits)[0, at]))
        found.append(said[0, 1:].tolist())
    return {"model_type": "switch_transformers", "as_wanted": True, **compared(right, found)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--write", action="store_true", help="stores the tokens for the tests")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=sorted(PUBLISHED))
    asked = parser.parse_args()
    golden: dict[str, list[list[int]]] = {}

    def published(name: str, folder: Path) -> dict[str, Any]:
        made(tiny(name), folder)
        golden[name] = theirs(folder)
        row = compared(golden[name], ours(folder))
        return {"model": name, "model_type": tiny(name)["model_type"], **row}

    def each(names: Iterable[str], run: Callable[[str, Path], dict[str, Any]]) -> list[Any]:
        rows = []
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                rows.append(run(name, Path(place) / "model"))
            show(name, rows[-1])
        return rows

    rows, some = each(asked.only, published), each(SOME_WINDOWS, windowed)
    sent = each(WRITTEN, written) + each(["switch"], written_switch)
    with tempfile.TemporaryDirectory() as place:
        golden_adapters = peft_tokens(Path(place))
        same = golden_adapters == served_adapters(Path(place))
    show("adapters of PEFT", {"adapters": len(ADAPTERS), "equal": same})
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {
        **versions,
        "rows": rows,
        "equal": sum(row["equal"] for row in rows),
        "of": len(rows),
        "windows_in_some_layers": some,
        "written": sent,
        "adapters": {"of_peft": ADAPTERS, "equal": same},
    }
    if asked.write:
        adapters = {
            name: {**how, "tokens": golden_adapters[name]} for name, how in ADAPTERS.items()
        }
        tokens = {"prompts": PROMPTS, "most": MOST, "tokens": golden, "adapters": adapters}
        GOLDEN.write_text(json.dumps(versions | tokens) + "\n")
    if asked.out:
        write(asked.out, result)
    print(f"{result['equal']} of {result['of']} models say the same tokens")
    print(f"{sum(row['equal'] for row in sent)} of {len(sent)} that are written do")
