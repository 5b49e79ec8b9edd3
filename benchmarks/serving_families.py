"""Are the tokens of a served folder those of `transformers`? Every Hugging Face family that is
imported, with small random weights, in float32 on a CPU.

    python benchmarks/serving_families.py [--write] [--out FILE]

`transformers` builds each model, saves it, and continues some prompts greedily; `read_folder` reads
the same folder and its engine answers all prompts together. It needs torch and transformers beside
shardlib. `--write` stores the tokens of `transformers` for tests/serving/test_folders.py, which
draws the same weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from shardlib.serving import Capacity  # noqa: E402
from shardlib.serving.folders.folder import read_folder  # noqa: E402
from tests.models.configs import PUBLISHED, tiny  # noqa: E402
from tests.serving.hf_folders import write_tokenizer  # noqa: E402

GOLDEN = ROOT / "tests" / "serving" / "transformers_tokens.json"
PROMPTS = ([5, 2, 7, 11, 60, 3, 9], [1], [33, 33, 12, 8, 4, 19, 21, 2, 40, 41, 5])
MOST = 18


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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        whole = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=MOST,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(whole[0, len(prompt) :].tolist())
    return found


def ours(folder: Path) -> list[list[int]]:
    """What the engine says, all prompts at once."""
    write_tokenizer(folder, 300)
    found = read_folder(folder, dtype="float32")
    engine = found.engine(Capacity(longest=32, slots=3, page=4))
    return engine.generate(PROMPTS, most=MOST)


def main() -> None:
    """Compares all families."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="stores the tokens for the tests")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=sorted(PUBLISHED))
    asked = parser.parse_args()
    rows, golden = list[dict[str, Any]](), dict[str, list[list[int]]]()
    for name in asked.only:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            made(tiny(name), folder)
            right, found = theirs(folder), ours(folder)
        golden[name] = right
        kinds = len({token for answer in right for token in answer})
        rows.append(
            {
                "model": name,
                "model_type": tiny(name)["model_type"],
                "equal": right == found,
                "tokens": sum(map(len, right)),
                "different_tokens": kinds,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    result = {
        **environment(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
        "equal": sum(row["equal"] for row in rows),
        "of": len(rows),
    }
    if asked.write:
        told = {"transformers": transformers.__version__, "torch": torch.__version__}
        GOLDEN.write_text(
            json.dumps({**told, "prompts": PROMPTS, "most": MOST, "tokens": golden}) + "\n"
        )
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['equal']} of {result['of']} families say the same tokens")


if __name__ == "__main__":
    main()
