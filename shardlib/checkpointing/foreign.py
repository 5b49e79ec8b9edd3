"""Users' own models from files of Hugging Face, and adapters in the format of PEFT.

    names = learn_names(program.state.params, tensors_of("folder"))
    print(names)                                  # check the mapping before it is used
    state = read_weights("folder", program, names)

Storage forms of an array of a Flax model in a tensor of PyTorch:

>>> forms_of((6, 2, 4), (8, 6)), forms_of((8, 2, 4), (8, 8))
(('transposed',), ('same', 'transposed'))
>>> forms_of((3, 3, 8, 16), (16, 8, 3, 3))
('convolution',)
>>> import numpy as np
>>> in_form(np.ones((6, 4)), "transposed", (4, 2, 3)).shape
(4, 2, 3)

The words of a path, with synonyms of different libraries unified:

>>> words("model.layers.#.self_attn.q_proj.weight") == words("blocks.#.attention.query.kernel")
True
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from scipy.optimize import linear_sum_assignment

from shardlib.annotation.trees import Tree, path_text
from shardlib.errors import CheckpointError, MissingFileError, raise_all
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.processes.values import whole

Shape = tuple[int, ...]


def forms_of(param: Shape, tensor: Shape) -> tuple[str, ...]:
    """The possible storage forms of an array in a tensor; () if there is none, two if the shapes
    are ambiguous, like those of square matrices.
    """
    if len(tensor) >= 3 and len(param) == len(tensor):
        order = (len(param) - 1, len(param) - 2, *range(len(param) - 2))
        if tuple(param[dim] for dim in order) == tensor:
            return ("convolution",)
    forms = ["same"] if param == tensor or _joins(param, tensor) else []
    if len(tensor) == 2 and len(param) >= 2 and _joins(param, tensor[::-1]):
        forms.append("transposed")
    return tuple(forms)


def in_form(tensor: np.ndarray, form: str, shape: Shape) -> np.ndarray:
    """The array stored in a tensor."""
    if form == "convolution":
        return tensor.transpose(*range(2, tensor.ndim), 1, 0)
    return (tensor.T if form == "transposed" else tensor).reshape(shape)


def _joins(param: Shape, tensor: Sequence[int]) -> bool:
    """True if merging neighbouring dims gives the dims of a tensor."""
    dim = 0
    for size in tensor:
        joined = 1
        while dim < len(param) and joined < size:
            joined *= param[dim]
            dim += 1
        if joined != size:
            return False
    return all(size == 1 for size in param[dim:])


# --------------------------------------------------------------------------------------------------
# LoRA adapters in the format of PEFT: `adapter_model.safetensors` and `adapter_config.json`.
#
#     write_adapter("out", program.module(state), {"up": "mlp.up_proj"}, base="base-model")
#     params = read_adapter("out", {"up": "mlp.up_proj"})            # arrays by dotted path
#     nnx.update(model, ...)                                         # or Engine.adapt(name, params)
#
# Flax's `nnx.LoRA` computes x A B with A[in, r] and B[r, out]; PEFT stores their transposes and
# multiplies the product by alpha / r, or by alpha / sqrt(r) if `use_rslora` is set. Adapters are
# written with alpha = r; when read, the factor is multiplied into B.

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_START = "base_model.model."
#: Settings of PEFT under which an adapter is not x A B times a factor.
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
        names: our module path -> the module's name in the base model, "layers.0.up" ->
            "model.layers.0.mlp.up_proj".
    """
    adapters = _adapters(params)
    ranks = {pair["lora_a"].shape[-1] for pair in adapters.values()}
    failures = [f"{path} has no name" for path in adapters if path not in names]
    failures += [f"{path} is not an adapter" for path in names if path not in adapters]
    failures += [f"ranks differ: {sorted(ranks)}"] if len(ranks) > 1 else []
    failures += [] if adapters else ["there are no arrays called lora_a and lora_b"]
    if failures:
        raise_all(CheckpointError, "the adapters cannot be written", failures)
    tensors: dict[str, np.ndarray] = {}
    for path, pair in adapters.items():
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
        "target_modules": sorted(names[path] for path in adapters),
        "inference_mode": True,
    }
    (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: str | Path, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Reads adapters."""
    config, tensors = _peft_files(Path(folder))
    modules = {module_name: path for path, module_name in names.items()}
    arrays: dict[str, np.ndarray] = {}
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
        arrays[f"{modules[module]}.lora.{kind.lower()}"] = array
    failures += [
        f"{module_name} is not there"
        for module_name, path in modules.items()
        if f"{path}.lora.lora_b" not in arrays
    ]
    if failures:
        raise_all(CheckpointError, f"the adapters in {folder} cannot be read", failures)
    return arrays


def _factor(config: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = config.get("lora_alpha", rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _adapters(params: Tree) -> dict[str, dict[str, np.ndarray]]:
    """The arrays of each adapter, by the path of its module."""
    adapters: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        parts = path_text(path).removesuffix(".value").split(".")
        if parts[-1] in ("lora_a", "lora_b"):
            module = ".".join(part for part in parts[:-1] if part != "lora")
            adapters.setdefault(module, {})[parts[-1]] = np.asarray(whole(leaf), np.float32)
    return {path: pair for path, pair in adapters.items() if len(pair) == 2}


def _peft_files(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
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


#: Words that carry no information.
_EMPTY = frozenset(
    {"proj", "projection", "model", "transformer", "params", "self", "net", "module"}
)
#: Synonyms.
_SAME = {
    **dict.fromkeys(("kernel", "scale", "embedding", "w"), "weight"),
    "b": "bias",
    **dict.fromkeys(("q",), "query"),
    **dict.fromkeys(("k",), "key"),
    **dict.fromkeys(("v",), "value"),
    **dict.fromkeys(("o", "output"), "out"),
    **dict.fromkeys(("attn", "attn1", "mha"), "attention"),
    **dict.fromkeys(("ffn", "feedforward", "ff", "feed", "forward"), "mlp"),
    **dict.fromkeys(("ln", "layernorm", "rmsnorm", "rms", "norms"), "norm"),
    **dict.fromkeys(("wte", "embeddings", "embedder", "tok", "token", "tokens"), "embed"),
    **dict.fromkeys(("wpe", "pos", "positions", "positional"), "position"),
    **dict.fromkeys(("wi", "fc1", "intermediate", "w1", "fcin"), "up"),
    **dict.fromkeys(("wo", "fc2", "w2", "fcout"), "down"),
    **dict.fromkeys(("lm", "classifier", "unembed", "logits"), "head"),
    **dict.fromkeys(("layers", "h", "blocks", "block"), "layer"),
    **dict.fromkeys(("convolution", "conv1", "conv2"), "conv"),
}


def words(path: str) -> Counter[str]:
    """The words of a path, with their counts."""
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower()
    parts_alike = [
        _SAME.get(part, part) for part in re.split(r"[._/]", parts) if part not in ("", "#")
    ]
    return Counter(word for word in parts_alike if word not in _EMPTY)


def likeness(left: Counter[str], right: Counter[str]) -> float:
    """Similarity of two paths, 0 to 1 (the Dice coefficient)."""
    total = sum(left.values()) + sum(right.values())
    return 2 * sum((left & right).values()) / total if total else 0.0


# --------------------------------------------------------------------------------------------------
# Names of tensors for the parameters of any model, learned from shapes and paths.
#
# Paths that differ only in numbers are one template, `layers.#.mlp.up.kernel`; two templates match
# if their shapes match and they have the same number of paths, or if one array stacks the others.
# Among the matches, the assignment with the most words in common is chosen. Pairs for which another
# assignment is nearly as good are unsure, and must be confirmed by the user.

#: Loss of similarity up to which another assignment counts as nearly as good.
NEAR = 0.02
#: Numbers between dots, of layers and the like.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Words in the names of arrays that no library transposes.
_TABLES = ("embed", "position")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Location of a parameter in the files.

    Attributes:
        names: of the tensors; several are stacked along the first dim.
        stacked: whether they are stacked.
        form: storage form of each, see `forms_of`.
    """

    names: tuple[str, ...]
    stacked: bool
    form: str


@dataclass(frozen=True, kw_only=True)
class LearnedNames:
    """Names of tensors by the paths of parameters.

    Attributes:
        sources: location of each parameter, by dotted path.
        unsure: templates of parameters -> those of tensors that match nearly as well.
        missing: parameters that no tensor matches.
        left: tensors that no parameter uses.
    """

    sources: Mapping[str, Source]
    unsure: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines: dict[str, None] = {}
        for path, source in self.sources.items():
            many = f", {len(source.names)} stacked" if source.stacked else ""
            template, name = _template(path), _template(source.names[0])
            lines[f"{template} <- {name} ({source.form}{many})"] = None
        lines |= {
            f"unsure: {path}, also {', '.join(others)}": None
            for path, others in self.unsure.items()
        }
        lines |= {f"missing: {path}": None for path in self.missing}
        lines |= {f"left: {path}": None for path in dict.fromkeys(map(_template, self.left))}
        return "\n".join(lines)

    def require(self) -> None:
        """Raises an error unless every parameter has exactly one matching tensor."""
        failures = [f"{path}: no tensor fits" for path in self.missing] + [
            f"{path}: {', '.join(others)} fit as well" for path, others in self.unsure.items()
        ]
        if failures:
            raise_all(
                CheckpointError,
                "the names of tensors are not known",
                failures,
                hint=(
                    'learn_names(..., given={"layers.#.up.kernel": "layers.#.fc.weight"}), or'
                    " transposed=True for square matrices of torch.nn.Linear"
                ),
            )


def learn_names(
    params: Tree,
    tensors: Mapping[str, Shape],
    *,
    expected_names: Mapping[str, str] | None = None,
    transposed: bool | None = None,
) -> LearnedNames:
    """Finds the tensors of the parameters of a model.

    Args:
        transposed: whether square matrices are transposed; by default like the matrices whose
            shapes decide it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    grouped = _grouped({path_text(path): tuple(leaf.shape) for path, leaf in leaves})
    there = _grouped({name: tuple(shape) for name, shape in tensors.items()})
    rows, columns = [*grouped], [*there]
    table = np.full((len(rows), len(columns)), -1.0)
    for row, param in enumerate(rows):
        for to, tensor in enumerate(columns):
            if _forms(grouped[param], there[tensor])[0]:
                expected = (expected_names or {}).get(param)
                exact = 2.0 if expected == tensor else likeness(words(param), words(tensor))
                table[row, to] = -1.0 if expected is not None and expected != tensor else exact
    pairs = [
        (index, to)
        for index, to in zip(*linear_sum_assignment(table, maximize=True), strict=True)
        if table[index, to] >= 0
    ]
    forms = {rows[index]: _forms(grouped[rows[index]], there[columns[to]]) for index, to in pairs}
    tables = {rows[row] for row, to in pairs if _is_table(rows[row]) or _is_table(columns[to])}
    matrices = {
        rows[row]
        for row, to in pairs
        if {len(group) for group in there[columns[to]].values()} == {2}
    } - tables
    asserted = None if transposed is None else {"transposed" if transposed else "same"}
    usual = asserted or _usual(forms, matrices)
    sources = {
        path: source
        for row, to in pairs
        for path, source in _sources(
            grouped[rows[row]],
            there[columns[to]],
            _chosen(forms[rows[row]][0], {"same"} if rows[row] in tables else usual),
            stacked=forms[rows[row]][1],
        ).items()
    }
    square = {
        group: ("its transpose",)
        for group, (forms_of_group, _) in forms.items()
        if len(forms_of_group) > 1 and len(usual) != 1 and group not in tables
    }
    forms_of_group = {rows[row] for row, _ in pairs}
    taken = {name for source in sources.values() for name in source.names}
    return LearnedNames(
        sources=sources,
        unsure={**square, **_unsure(table, pairs, rows, columns)},
        missing=tuple(
            path for group in rows if group not in forms_of_group for path in grouped[group]
        ),
        left=tuple(name for name in tensors if name not in taken),
    )


def _grouped(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Shapes by path, by template; in the order of the numbers."""
    groups: dict[str, dict[str, Shape]] = {}
    for path, shape in shapes.items():
        groups.setdefault(_template(path), {})[path] = shape
    return {
        template: dict(sorted(group.items(), key=lambda item: _numbers(item[0])))
        for template, group in groups.items()
    }


def _template(path: str) -> str:
    return _NUMBER.sub("#", path)


def _numbers(path: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(path)))


def _forms(
    params: Mapping[str, Shape], tensors: Mapping[str, Shape]
) -> tuple[tuple[str, ...], bool]:
    """(possible storage forms of the parameters in the tensors, whether they are stacked)."""
    shapes, theirs = set(params.values()), set(tensors.values())
    if len(shapes) != 1 or len(theirs) != 1:
        return (), False
    (shape,), (stored_shape,) = shapes, theirs
    if len(params) == len(tensors):
        return forms_of(shape, stored_shape), False
    if len(params) == 1 and shape and shape[0] == len(tensors):
        return forms_of(shape[1:], stored_shape), True
    return (), False


def _is_table(template: str) -> bool:
    return any(word in words(template) for word in _TABLES)


def _usual(forms: Mapping[str, tuple[tuple[str, ...], bool]], matrices: set[str]) -> set[str]:
    """The storage forms of the matrices whose shapes decide it; if it is one, square ones are
    assumed to have it, too.
    """
    return {
        forms_here[0]
        for path, (forms_here, _) in forms.items()
        if path in matrices and len(forms_here) == 1
    }


def _chosen(forms: tuple[str, ...], usual: set[str]) -> str:
    """The form of a template; for square matrices without evidence, any."""
    return forms[0] if len(forms) == 1 else next(iter(usual), forms[0])


def _sources(
    params: Mapping[str, Shape], tensors: Mapping[str, Shape], form: str, *, stacked: bool
) -> dict[str, Source]:
    if stacked:
        (path,) = params
        return {path: Source(names=tuple(tensors), stacked=True, form=form)}
    return {
        path: Source(names=(name,), stacked=False, form=form)
        for path, name in zip(params, tensors, strict=True)
    }


def _unsure(
    table: np.ndarray, pairs: list[tuple[Any, Any]], rows: list[str], columns: list[str]
) -> dict[str, tuple[str, ...]]:
    """Pairs whose exchange would hardly reduce the similarity."""
    alternatives: dict[str, list[str]] = {}
    owner = {to: row for row, to in pairs}
    for row, to in pairs:
        for column in range(len(columns)):
            if column == to or table[row, column] < 0 or table[row, to] >= 2:
                continue
            loss = table[row, to] - table[row, column]
            if column in owner:
                back = table[owner[column], to]
                loss = np.inf if back < 0 else loss + table[owner[column], column] - back
            if loss <= NEAR:
                alternatives.setdefault(rows[row], []).append(columns[column])
    return {path: tuple(others) for path, others in alternatives.items()}


# --------------------------------------------------------------------------------------------------
# The parameters of a user's own model, read from safetensors files by learned names.

del ml_dtypes  # imported so that NumPy supports bfloat16


def tensors_of(folder: str | Path) -> dict[str, Shape]:
    """Shapes of all tensors of a folder, by name; no tensor is read."""
    return {
        name: tuple(file.get_slice(name).get_shape())
        for path in _weights_files(folder)
        for file in [_opened(path)]
        for name in file.keys()  # noqa: SIM118
    }


def read_weights(
    folder: str | Path, program: Program, names: LearnedNames, *, seed: int = 0
) -> TrainState:
    """The state before the first step, with parameters from files in the plan's layout, and a new
    optimizer state.

    The host holds one parameter at a time.
    """
    names.require()
    home = {
        name: file
        for path in _weights_files(folder)
        for file in [_opened(path)]
        for name in file.keys()  # noqa: SIM118
    }
    state = program.init(seed)
    leaves, structure = jax.tree_util.tree_flatten_with_path(state.params)
    params = structure.unflatten(
        [_read(home, names.sources[path_text(path)], leaf) for path, leaf in leaves]
    )
    return program.anew(replace(state, params=params))


def _read(home: Mapping[str, Any], source: Source, leaf: jax.Array) -> jax.Array:
    shape = leaf.shape[1:] if source.stacked else leaf.shape
    parts = [in_form(home[name].get_tensor(name), source.form, shape) for name in source.names]
    stacked = np.stack(parts) if source.stacked else parts[0]
    stacked = np.ascontiguousarray(stacked).astype(leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: stacked[index], dtype=stacked.dtype
    )


def _weights_files(folder: str | Path) -> list[Path]:
    path = Path(folder)
    paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not paths:
        raise MissingFileError(f"there are no safetensors files in {path}\nTry: another folder")
    return paths


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}\nTry: another copy of it") from error
