"""LoRA adapters in the format of PEFT: `adapter_model.safetensors` and `adapter_config.json`.

    write_adapter("out", program.module(state), {"up": "mlp.up_proj"}, base="base-model")
    params = read_adapter("out", {"up": "mlp.up_proj"})            # arrays by dotted path
    nnx.update(model, ...)                                          # or Engine.adapt(name, params)

Flax's `nnx.LoRA` computes x A B with A[in, r] and B[r, out]; PEFT stores their transposes and
multiplies the product with alpha / r, or with alpha / sqrt(r) where `use_rslora` is set. What is
written has alpha = r; what is read has the factor in B.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.errors import CheckpointError, MissingFileError, raise_all
from shardlib.processes.values import whole

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_START = "base_model.model."
#: Settings of PEFT under which an adapter computes something else than x A B times a factor.
_OTHERS = ("use_dora", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens")


def write_adapter(
    folder: str | Path,
    params: Tree,
    names: Mapping[str, str],
    *,
    base: str | None = None,
    task: str | None = None,
) -> None:
    """Writes the adapters of a model.

    Args:
        names: the name of the module in the base model by the path of ours, "layers.0.up" ->
            "model.layers.0.mlp.up_proj".
    """
    found = _adapters(params)
    ranks = {pair["lora_a"].shape[-1] for pair in found.values()}
    failures = [f"{path} has no name" for path in found if path not in names]
    failures += [f"{path} is no adapter" for path in names if path not in found]
    failures += [f"ranks differ: {sorted(ranks)}"] if len(ranks) > 1 else []
    failures += [] if found else ["there are no arrays called lora_a and lora_b"]
    if failures:
        raise_all(CheckpointError, "the adapters cannot be written", failures)
    tensors: dict[str, np.ndarray] = {}
    for path, pair in found.items():
        start = f"{_START}{names[path]}"
        tensors[f"{start}.lora_A.weight"] = np.ascontiguousarray(pair["lora_a"].T)
        tensors[f"{start}.lora_B.weight"] = np.ascontiguousarray(pair["lora_b"].T)
    (rank,) = ranks
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    save_file(tensors, place / TENSORS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(names[path] for path in found),
        "inference_mode": True,
    }
    (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: str | Path, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Reads adapters."""
    config, tensors = _files(Path(folder))
    modules = {other: path for path, other in names.items()}
    found: dict[str, np.ndarray] = {}
    failures = [f"{name} is {config[name]!r}" for name in _OTHERS if config.get(name)]
    if config.get("peft_type") != "LORA":
        failures.append(f"peft_type is {config.get('peft_type')!r}")
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix(_START).removesuffix(".weight").rpartition(".")
        if module not in modules or kind not in ("lora_A", "lora_B"):
            failures.append(f"{name} has no place")
            continue
        factor = 1.0 if kind == "lora_A" else _factor(config, module, tensor.shape[-1])
        array = np.ascontiguousarray(tensor.astype(np.float32).T) * np.float32(factor)
        found[f"{modules[module]}.lora.{kind.lower()}"] = array
    failures += [
        f"{other} is not there"
        for other, path in modules.items()
        if f"{path}.lora.lora_b" not in found
    ]
    if failures:
        raise_all(CheckpointError, f"the adapters in {folder} cannot be read", failures)
    return found


def _factor(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config.get("lora_alpha", rank)
    for pattern, other in (config.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = other
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _adapters(params: Tree) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each adapter, by the path of the module that it is of."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        parts = path_text(path).removesuffix(".value").split(".")
        if parts[-1] in ("lora_a", "lora_b"):
            module = ".".join(part for part in parts[:-1] if part != "lora")
            found.setdefault(module, {})[parts[-1]] = np.asarray(whole(leaf), np.float32)
    return {path: pair for path, pair in found.items() if len(pair) == 2}


def _files(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    if not (folder / TENSORS).is_file() or not (folder / CONFIG).is_file():
        raise MissingFileError(
            f"{folder} has no {TENSORS} beside {CONFIG}\nTry: the folder that PEFT's"
            " save_pretrained made"
        )
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8")), load_file(
            folder / TENSORS
        )
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(
            f"the adapter in {folder} cannot be read: {error}\nTry: another copy of it"
        ) from error
