"""Adapters that come in folders of the library PEFT: `adapter_config.json` and
`adapter_model.safetensors`.

    served, adapters = adapted(read_folder("Llama-3.1-8B"), "Llama-3.1-8B", {"legal": "legal-lora"})
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file

from shardlib import models
from shardlib.annotation.read import read
from shardlib.checkpointing.huggingface.located import Located, locate
from shardlib.checkpointing.huggingface.names import names
from shardlib.checkpointing.huggingface.reading import read_config
from shardlib.checkpointing.tree import named_leaves
from shardlib.errors import CheckpointError, MissingFileError, ModelError, raise_all
from shardlib.models.adapted import add_low_rank
from shardlib.models.blocks.low_rank import MATRICES
from shardlib.serving.served import Served
from shardlib.serving.weights import both
from shardlib.untrusted import Limits, fit, printable, read_json, shown

#: What PEFT puts in front of the names of a model's tensors.
START = "base_model.model."
CONFIG = Limits(bytes=1 << 20)
#: Keys of `adapter_config.json` that must have no other value than these, if any.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "lora_bias": (False,),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
}

#: Ours by dotted path.
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """An adapter as its folder has it.

    Attributes:
        scale: of its products.
        tensors: by name, without what PEFT puts in front and behind: (A [rank, in], B [out, rank]).
    """

    scale: float
    tensors: Mapping[str, tuple[np.ndarray, np.ndarray]]


def adapted(
    served: Served, folder: str | Path, adapters: Mapping[str, str | Path]
) -> tuple[Served, dict[str, Arrays]]:
    """A model with room for adapters, and these, as `Engine.adapt` takes them."""
    config, family = read_config(Path(folder) / "config.json")
    assert served.config is not None
    config = replace(served.config, name=config.name)
    model = read(served.init)
    shapes = {path: tuple(leaf.shape) for path, leaf in named_leaves(model.params).items()}
    places = {
        located.name((layer,)).removesuffix(".weight"): (located, layer)
        for located in locate(config, names(config, family), shapes)
        if located.layers is not None and located.lead == 1 and not located.form.windows
        for layer in range(located.shape[0])
    }
    loaded = {name: read_adapter(Path(place)) for name, place in adapters.items()}
    for name, adapter in loaded.items():
        _check(name, adapter, places)
    used = {places[tensor][0].path for adapter in loaded.values() for tensor in adapter.tensors}
    rank = max(a.shape[0] for adapter in loaded.values() for a, _ in adapter.tensors.values())

    def init(rngs: nnx.Rngs) -> nnx.Module:
        modules = {path.rsplit(".", 1)[1] for path in used}
        return add_low_rank(models.build(config)[0](rngs), rank, modules, rngs)

    adapted_model = read(init)
    low = {
        path: leaf
        for path, leaf in named_leaves(adapted_model.params).items()
        if path.endswith(("_lora.a", "_lora.b"))
    }
    empty = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in low.items()}
    params, state = both(model, served.weights)
    arrays = {**named_leaves(params), **empty}
    leaves = [arrays[path] for path in named_leaves(adapted_model.params)]
    wide = replace(
        served,
        init=init,
        weights=(jax.tree.structure(adapted_model.params).unflatten(leaves), state),
    )
    return wide, {name: _arrays(adapter, places, empty) for name, adapter in loaded.items()}


def read_adapter(folder: Path) -> PeftAdapter:
    """Reads a folder of PEFT."""
    path, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for required in (path, file):
        if not required.is_file():
            raise MissingFileError(
                f"the folder {folder} has no {required.name}\nTry: model.save_pretrained(folder) of"
                " the library peft, which writes one"
            )
    settings = read_json(path, "adapter configuration", ModelError, limits=CONFIG)
    if not isinstance(settings, Mapping):
        raise ModelError(f"{path} holds {type(settings).__name__}, not a JSON object")
    failures = [
        f"{key} is {shown(settings[key])}; {shown(allowed[0])} is served"
        for key, allowed in PLAIN.items()
        if key in settings and settings[key] not in allowed
    ]
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        failures.append(f"r is {shown(rank)}; it is a whole number above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        failures.append(f"lora_alpha is {shown(alpha)}; it is a number")
    if failures:
        raise_all(ModelError, f"the adapter {folder} cannot be served", failures)
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} is no file that can be read ({fit(printable(str(error)), 200)})\nTry: fetch it"
            " again"
        ) from error
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return PeftAdapter(scale=scale, tensors=_paired(file, tensors, rank))


def _paired(
    file: Path, tensors: Mapping[str, np.ndarray], rank: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The two matrices of each product."""
    ends = (".lora_A.weight", ".lora_B.weight")
    bare = {name.removeprefix(START): array for name, array in tensors.items()}
    stems = {name.removesuffix(ends[0]).removesuffix(ends[1]) for name in bare}
    wrong = sorted(stem for stem in stems if any(stem + end not in bare for end in ends))
    pairs = {stem: (bare[stem + ends[0]], bare[stem + ends[1]]) for stem in stems - {*wrong}}
    wrong += [
        stem
        for stem, (a, b) in pairs.items()
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank
    ]
    if wrong or not pairs:
        raise_all(
            ModelError,
            f"{file} is no adapter of rank {rank}; these are no pairs of matrices",
            wrong[:5] or ["it is empty"],
        )
    return pairs


def _check(name: str, adapter: PeftAdapter, places: Mapping[str, tuple[Located, int]]) -> None:
    """Refuses an adapter of matrices that the model does not have, or that have none."""
    failures: list[str] = []
    for tensor, (a, b) in adapter.tensors.items():
        if tensor not in places or not _dims(places[tensor][0]):
            failures.append(f"{tensor} has no adapter in the model")
            continue
        shape = places[tensor][0].form.file_shape(places[tensor][0].inner)
        if (b.shape[0], a.shape[1]) != shape:
            failures.append(f"{tensor} is {[b.shape[0], a.shape[1]]}; that of the model {[*shape]}")
    if failures:
        raise_all(ModelError, f"the adapter {name!r} does not fit the model", failures[:5])


def _dims(located: Located) -> int:
    """How many dims of ours a matrix multiplies; 0 for no matrix that has adapters."""
    *_, place, name = located.path.split(".")
    return MATRICES.get(place, {}).get(name, 0)


def _arrays(
    adapter: PeftAdapter, places: Mapping[str, tuple[Located, int]], empty: Arrays
) -> Arrays:
    """An adapter in our parameters; what it does not change is zero."""
    arrays = {path: array.copy() for path, array in empty.items()}
    for tensor, (a, b) in adapter.tensors.items():
        place, layer = places[tensor]
        into = place.inner[: _dims(place)]
        rank, out = a.shape[0], place.inner[_dims(place) :]
        mine_a, mine_b = arrays[f"{place.path}_lora.a"], arrays[f"{place.path}_lora.b"]
        mine_a[layer, ..., :rank] = a.astype(np.float32).T.reshape(*into, rank)
        mine_b[layer, :rank] = adapter.scale * b.astype(np.float32).T.reshape(rank, *out)
    return arrays
