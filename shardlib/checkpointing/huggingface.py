"""The parameters of reference models as the safetensors files of Hugging Face, read and written
shard by shard.

    # A training state: parameters from the files, a new optimizer.
    imported = load("Llama-3.1-8B", program)
    save(program, imported.state, "out", config="Llama-3.1-8B/config.json")

Neither a device nor a host ever holds the whole model: one device's shard of one parameter is read
at a time, and one tensor of one layer is written at a time.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from shardlib.annotation.names import Model
from shardlib.annotation.trees import Tree
from shardlib.checkpointing.tree import check_target, named_leaves, shortened
from shardlib.errors import CheckpointError, MissingFileError, ModelError, raise_all
from shardlib.findings import Finding
from shardlib.lowering.program import Program
from shardlib.lowering.runtime import TrainState
from shardlib.models import huggingface
from shardlib.models.config import EncoderDecoderConfig, LatentAttention, TransformerConfig
from shardlib.models.huggingface import CONFIG
from shardlib.processes.values import owners_of, whole
from shardlib.untrusted.data import (
    JsonMapping,
    Limits,
    bounded,
    construct,
    fit,
    printable,
    read_json,
    shown,
)

INDEX = "model.safetensors.index.json"
#: dtypes of files that NumPy supports.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


#: Size limit of an index, which lists every tensor of a model.
INDEX_LIMITS = Limits(bytes=1 << 27)


@dataclass(frozen=True, kw_only=True)
class _Index:
    """The mapping from tensors to files in an index."""

    weight_map: Mapping[str, str]


@dataclass(kw_only=True)
class Files:
    """Open files of a folder; to be used in a `with` statement.

    Attributes:
        tensors: name -> (shape, dtype as spelled in the files).
    """

    folder: Path
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _slices: dict[str, Any] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Files:
        for path in _paths(self.folder):
            if not path.is_file():
                self._open.close()
                raise CheckpointError(
                    f"{path} is not a file that can be read\nTry: fetch the file again"
                )
            try:
                file = self._open.enter_context(safe_open(path, "np"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, ValueError, TypeError) as error:
                self._open.close()
                raise CheckpointError(
                    f"{path} cannot be read ({fit(printable(str(error)), 300)})\nTry: fetch the"
                    " file again"
                ) from error
            if twice := sorted(set(slices) & set(self._slices)):
                self._open.close()
                raise CheckpointError(
                    f"{path} has tensors that another file has, too:"
                    f" {', '.join(map(shown, twice[:10]))}\nTry: the files of one model in the"
                    f" folder, or its {INDEX}"
                )
            self._slices |= slices
            self.tensors |= {
                name: (tuple(piece.get_shape()), piece.get_dtype())
                for name, piece in slices.items()
            }
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._open.close()

    def read(self, name: str, places: Sequence[np.ndarray]) -> np.ndarray:
        """The elements of a tensor at some positions, one list for each dim; reads only the range
        between the first and the last position.
        """
        region = tuple(slice(int(dim.min()), int(dim.max()) + 1) for dim in places)
        values: np.ndarray = self._slices[name][region]
        for axis, (dim, span) in enumerate(zip(places, region, strict=True)):
            if len(dim) != values.shape[axis] or (np.diff(dim) != 1).any():
                values = np.take(values, dim - span.start, axis)
        return values


def _paths(folder: Path) -> list[Path]:
    """The files listed in the index, or else all safetensors files."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(
            set(
                construct(
                    _Index,
                    read_json(
                        index, "index of safetensors files", CheckpointError, limits=INDEX_LIMITS
                    ),
                    f"the index {index} of safetensors files",
                    CheckpointError,
                    hint="fetch it again",
                ).weight_map.values()
            )
        )
        outside = [
            f"{shown(name)} is not a name of a file of its folder"
            for name in names
            if Path(name).name != name or name in ("", ".", "..") or "\0" in name or len(name) > 255
        ]
        if outside:
            raise_all(
                CheckpointError,
                f"{index} names files that it may not name",
                bounded(outside),
                hint="fetch it again, from whom you trust",
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MissingFileError(
                f"{index} names files that are not in the folder:"
                f" {', '.join(map(shown, missing[:20]))}\nTry: fetch them too"
            )
        return [folder / name for name in names]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise MissingFileError(
            f"there is no .safetensors file in {folder}\nTry: the folder of a model as Hugging Face"
            " has it, not in the older .bin form"
        )
    return paths


# --------------------------------------------------------------------------------------------------
# Storage forms of a layer's parameter in a tensor of a file: transposed, merged, shared with other
# parameters, or with interleaved pairs.
#
# A form has a letter for each dim, ours first: "e h w -> h.w e" says that the file merges heads and
# head width to one dim, and transposes the matrix. If a letter covers only a window of the file's
# dim, `windows` has the size of the dim and the start of the window; a letter that is not among
# ours is one position of the file's dim.

#: Range [start, stop) of each of our dims.
Part = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Form:
    """Storage form of one parameter of one layer in a tensor.

    Attributes:
        dims: "ours -> theirs", one letter per dim; dims that the file merges are joined by dots.
        windows: letter -> (size of the dim in the file, start of our window).
        paired: the letter of rotary dims whose pairs are interleaved in the file; ours are two
            halves (arXiv:2104.09864).

    >>> Form(dims="e h w -> h.w e").file_shape((16, 4, 8))
    (32, 16)
    """

    dims: str
    windows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    paired: str = ""

    @cached_property
    def ours(self) -> list[str]:
        """Our letters, in order."""
        return self.dims.split("->")[0].split()

    @cached_property
    def theirs(self) -> list[list[str]]:
        """The letters of each dim of the file."""
        return [dim.split(".") for dim in self.dims.split("->")[1].split()]

    def file_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor in the file, from our shape."""
        full = self._full(shape)
        return tuple(math.prod(full[letter] for letter in dim) for dim in self.theirs)

    def places(self, shape: Sequence[int], part: Part) -> list[np.ndarray]:
        """The positions in each dim of the file of a part of ours, in the order of the letters of
        the dim.
        """
        full, sizes, ranges = (
            self._full(shape),
            dict(zip(self.ours, shape, strict=True)),
            dict(zip(self.ours, part, strict=True)),
        )

        def of_letter(letter: str) -> np.ndarray:
            first = self.windows[letter][1] if letter in self.windows else 0
            start, stop = ranges.get(letter, (0, 1))
            return first + (
                _neighbours(sizes[letter])[start:stop]
                if letter == self.paired
                else np.arange(start, stop)
            )

        return [
            np.ravel_multi_index(
                np.ix_(*map(of_letter, dim)), [full[letter] for letter in dim]
            ).reshape(-1)
            for dim in self.theirs
        ]

    def ours_from(self, chosen: np.ndarray, part: Part) -> np.ndarray:
        """A part of ours from the elements of the file's tensor at `places`."""
        sizes = {
            letter: stop - start for letter, (start, stop) in zip(self.ours, part, strict=True)
        }
        return np.transpose(
            chosen.reshape([sizes[letter] for letter in self._order]),
            [self._order.index(letter) for letter in self.ours],
        )

    def into(self, tensor: np.ndarray, array: np.ndarray) -> None:
        """Writes a whole parameter of ours to its positions in a tensor of the file's shape."""
        places = self.places(array.shape, [(0, size) for size in array.shape])
        turned = np.transpose(array, [self.ours.index(letter) for letter in self._order])
        tensor[np.ix_(*places)] = turned.reshape([len(dim) for dim in places])

    @cached_property
    def _order(self) -> list[str]:
        """Our letters in the order of the file."""
        return [letter for dim in self.theirs for letter in dim if letter in self.ours]

    def _full(self, shape: Sequence[int]) -> dict[str, int]:
        """Size of every letter in the file, from our shape."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return {
            letter: self.windows[letter][0] if letter in self.windows else sizes[letter]
            for dim in self.theirs
            for letter in dim
        }


def _neighbours(size: int) -> np.ndarray:
    """The positions of two halves in interleaved pairs: 0, 2, 4, ..., 1, 3, 5, ..."""
    return np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])


# --------------------------------------------------------------------------------------------------
# Names of the parameters of reference models in the files of their families.
#
# One table for each family: our path within a layer -> the name in the file and the form.
# `{layer}` and `{expert}` stand for numbers. Names are those of the published files, which
# `transformers` reads and writes. Tables include parameters that only some configurations have
# (biases, norms of heads); the model's own parameters select the rows.


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Location of a parameter in the files.

    Attributes:
        name: of the tensor, with `{layer}` and `{expert}`; parameters with `{expert}` have a dim of
            experts before the dims of the form.
        form: storage form of one layer's or one expert's part.
    """

    name: str
    form: Form


#: Our path within a layer, or outside of layers -> its location.
Table = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a model's parameters.

    Attributes:
        ends: parameters outside of layers.
        stacks: our name of a stack of layers -> the parameters of its layers.
        starts: possible prefixes of the model's names in files; the first is written.
        ignored: suffixes of names in some files that are not parameters.
    """

    ends: Table
    stacks: Mapping[str, Table]
    starts: tuple[str, ...] = ("model.",)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


def names(config: TransformerConfig | EncoderDecoderConfig, family: str) -> Names:
    """The names of the parameters of a configuration."""
    if isinstance(config, EncoderDecoderConfig):
        return _switch(config)
    if family == "gpt2":
        return _gpt2()
    table = (
        _NORMS["sandwich" if config.post_norms else "before"]
        | _mlp("mlp.", "mlp.")
        | _EXPERTS.get(family, {})
    )
    table |= (
        _latent(config.latent)
        if config.latent
        else _attention("self_attn.", ("q_proj", "k_proj", "v_proj", "o_proj"))
    )
    layer = {
        path: _t(f"model.layers.{{layer}}.{tensor.name}", tensor.form)
        for path, tensor in table.items()
    }
    starts = (
        ("model.", "language_model.model.", "model.language_model.")
        if family == "gemma3"
        else ("model.",)
    )
    return Names(ends=_ENDS, stacks={"layers": layer, "dense_layers": layer}, starts=starts)


def _t(
    name: str,
    form: str | Form,
    windows: Mapping[str, tuple[int, int]] | None = None,
    paired: str = "",
) -> Tensor:
    return Tensor(
        name=name,
        form=(
            form
            if isinstance(form, Form)
            else Form(dims=form, windows=windows or {}, paired=paired)
        ),
    )


_LINEAR, _VECTOR = "i o -> o i", "i -> i"
_ENDS: Table = {
    "embedding": _t("model.embed_tokens.weight", "v e -> v e"),
    "norm.scale": _t("model.norm.weight", _VECTOR),
    "head": _t("lm_head.weight", "e v -> v e"),
}
_NORMS: Mapping[str, dict[str, Tensor]] = {
    "before": {
        "attention_norm.scale": _t("input_layernorm.weight", _VECTOR),
        "mlp_norm.scale": _t("post_attention_layernorm.weight", _VECTOR),
    },
    "sandwich": {
        "attention_norm.scale": _t("input_layernorm.weight", _VECTOR),
        "attention_post_norm.scale": _t("post_attention_layernorm.weight", _VECTOR),
        "mlp_norm.scale": _t("pre_feedforward_layernorm.weight", _VECTOR),
        "mlp_post_norm.scale": _t("post_feedforward_layernorm.weight", _VECTOR),
    },
}


def _attention(
    start: str, theirs: tuple[str, str, str, str], ours: str = "attention."
) -> dict[str, Tensor]:
    """Queries, keys, values and the output projection, with optional biases and norms."""
    *three, out = theirs
    tensors = {
        f"{ours}out": _t(f"{start}{out}.weight", "h w e -> e h.w"),
        f"{ours}out_bias": _t(f"{start}{out}.bias", _VECTOR),
        f"{ours}query_norm.scale": _t(f"{start}q_norm.weight", _VECTOR),
        f"{ours}key_norm.scale": _t(f"{start}k_norm.weight", _VECTOR),
    }
    for which, name in zip(("query", "key", "value"), three, strict=True):
        tensors[ours + which] = _t(f"{start}{name}.weight", "e h w -> h.w e")
        tensors[f"{ours}{which}_bias"] = _t(f"{start}{name}.bias", "h w -> h.w")
    return tensors


def _latent(latent: LatentAttention) -> dict[str, Tensor]:
    """Latent attention of DeepSeek, whose files merge rotary and other dims, and keys and
    values.
    """
    head, down, both = (
        latent.nope_dim + latent.rope_dim,
        latent.kv_lora + latent.rope_dim,
        latent.nope_dim + latent.v_dim,
    )
    query = "self_attn.q_b_proj.weight" if latent.q_lora else "self_attn.q_proj.weight"
    return {
        "attention.query_down": _t("self_attn.q_a_proj.weight", _LINEAR),
        "attention.query_norm.scale": _t("self_attn.q_a_layernorm.weight", _VECTOR),
        "attention.query": _t(query, "s h w -> h.w s", {"w": (head, 0)}),
        "attention.query_rope": _t(query, "s h r -> h.r s", {"r": (head, latent.nope_dim)}, "r"),
        "attention.down": _t("self_attn.kv_a_proj_with_mqa.weight", "e k -> k e", {"k": (down, 0)}),
        "attention.key_rope": _t(
            "self_attn.kv_a_proj_with_mqa.weight", "e r -> r e", {"r": (down, latent.kv_lora)}, "r"
        ),
        "attention.norm.scale": _t("self_attn.kv_a_layernorm.weight", _VECTOR),
        "attention.out": _t("self_attn.o_proj.weight", "h w e -> e h.w"),
        "attention.key": _t("self_attn.kv_b_proj.weight", "k h w -> h.w k", {"w": (both, 0)}),
        "attention.value": _t(
            "self_attn.kv_b_proj.weight", "k h w -> h.w k", {"w": (both, latent.nope_dim)}
        ),
    }


def _mlp(
    start: str, ours: str, theirs: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    """The two or three matrices of a feed-forward, or of an expert."""
    pairs = list(zip(("gate", "up", "down"), theirs, strict=True))
    return {
        **{ours + which: _t(f"{start}{name}.weight", _LINEAR) for which, name in pairs},
        **{f"{ours}{which}_bias": _t(f"{start}{name}.bias", _VECTOR) for which, name in pairs},
    }


def _routed(
    router: str, expert: str, theirs: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    return {"experts.router": _t(router, _LINEAR), **_mlp(expert, "experts.", theirs)}


_QWEN_EXPERTS = _routed("mlp.gate.weight", "mlp.experts.{expert}.")
_DEEPSEEK_EXPERTS = {
    **_QWEN_EXPERTS,
    **_mlp("mlp.shared_experts.", "experts.shared."),
    "experts.bias": _t("mlp.gate.e_score_correction_bias", _VECTOR),
}
_EXPERTS: Mapping[str, dict[str, Tensor]] = {
    "mixtral": _routed(
        "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2")
    ),
    "qwen2_moe": {
        **_QWEN_EXPERTS,
        **_mlp("mlp.shared_expert.", "experts.shared."),
        "experts.shared_gate": _t("mlp.shared_expert_gate.weight", "e -> o e", {"o": (1, 0)}),
    },
    "qwen3_moe": _QWEN_EXPERTS,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _DEEPSEEK_EXPERTS),
}


def _gpt2() -> Names:
    """GPT-2, whose matrices are not transposed and whose queries, keys and values are one
    matrix.
    """
    start = "h.{layer}."
    layer = {
        **{
            f"{ours}_norm.{which}": _t(f"{start}{name}.{end}", _VECTOR)
            for ours, name in (("attention", "ln_1"), ("mlp", "ln_2"))
            for which, end in (("scale", "weight"), ("bias", "bias"))
        },
        **{
            f"attention.{which}": _t(
                f"{start}attn.c_attn.weight", "e h w -> e k.h.w", {"k": (3, i)}
            )
            for i, which in enumerate(("query", "key", "value"))
        },
        **{
            f"attention.{which}_bias": _t(f"{start}attn.c_attn.bias", "h w -> k.h.w", {"k": (3, i)})
            for i, which in enumerate(("query", "key", "value"))
        },
        "attention.out": _t(f"{start}attn.c_proj.weight", "h w e -> h.w e"),
        "attention.out_bias": _t(f"{start}attn.c_proj.bias", _VECTOR),
        "mlp.up": _t(f"{start}mlp.c_fc.weight", "i o -> i o"),
        "mlp.up_bias": _t(f"{start}mlp.c_fc.bias", _VECTOR),
        "mlp.down": _t(f"{start}mlp.c_proj.weight", "i o -> i o"),
        "mlp.down_bias": _t(f"{start}mlp.c_proj.bias", _VECTOR),
    }
    ends = {
        "embedding": _t("wte.weight", "v e -> v e"),
        "positions": _t("wpe.weight", "p e -> p e"),
        "norm.scale": _t("ln_f.weight", _VECTOR),
        "norm.bias": _t("ln_f.bias", _VECTOR),
        "head": _t("lm_head.weight", "e v -> v e"),
    }
    return Names(
        ends=ends,
        stacks={"layers": layer},
        starts=("", "transformer."),
        ignored=(".attn.bias", ".attn.masked_bias"),
    )


def _switch(config: EncoderDecoderConfig) -> Names:
    """Switch, with the names of T5: an encoder and a decoder, whose first layers contain the
    relative position biases of all.
    """
    ends = {
        "embedding": _t("shared.weight", "v e -> v e"),
        "head": _t("lm_head.weight", "e v -> v e"),
    }
    stacks: dict[str, Table] = {}
    three = ("wi_0", "wi_1" if config.gated else "wi", "wo")
    for stack, last in (("encoder", 1), ("decoder", 2)):
        ends[f"{stack}.bias"] = _t(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "b h -> b h"
        )
        ends[f"{stack}.norm.scale"] = _t(f"{stack}.final_layer_norm.weight", _VECTOR)
        start = f"{stack}.block.{{layer}}.layer."
        layer = {
            **_attention(f"{start}0.SelfAttention.", ("q", "k", "v", "o")),
            "attention_norm.scale": _t(f"{start}0.layer_norm.weight", _VECTOR),
            **_attention(f"{start}1.EncDecAttention.", ("q", "k", "v", "o"), "cross."),
            "cross_norm.scale": _t(f"{start}1.layer_norm.weight", _VECTOR),
            "mlp_norm.scale": _t(f"{start}{last}.layer_norm.weight", _VECTOR),
            **_mlp(f"{start}{last}.mlp.", "mlp.", three),
            **_routed(
                f"{start}{last}.mlp.router.classifier.weight",
                f"{start}{last}.mlp.experts.expert_{{expert}}.",
                three,
            ),
        }
        stacks[f"{stack}.layers"] = layer
    return Names(
        ends=ends,
        stacks=stacks,
        starts=("",),
        ignored=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    )


# --------------------------------------------------------------------------------------------------
# The tensors in the files for each part of a model's parameters: the tables of names, expanded for
# one model.


@dataclass(frozen=True, kw_only=True)
class Located:
    """One parameter of ours and the locations of its parts.

    Attributes:
        path: of the parameter, with dots.
        shape: of the whole parameter; dims of layers and experts come first.
        tensor: the row of the table.
        layers: number in the files of each layer of the parameter's first dim; None if it has no
            such dim.
    """

    path: str
    shape: tuple[int, ...]
    tensor: Tensor
    layers: tuple[int, ...] | None

    @property
    def lead(self) -> int:
        """Number of leading dims of layers and experts."""
        return (self.layers is not None) + ("{expert}" in self.tensor.name)

    @property
    def form(self) -> Form:
        """The storage form of the other dims."""
        return self.tensor.form

    @property
    def inner(self) -> tuple[int, ...]:
        """The other dims."""
        return self.shape[self.lead :]

    def name(self, place: tuple[int, ...]) -> str:
        """Name of the tensor with the part at a position of the leading dims."""
        numbers = list(place)
        layer = self.layers[numbers.pop(0)] if self.layers is not None else 0
        return self.tensor.name.format(layer=layer, expert=numbers[0] if numbers else 0)

    def places(self) -> Iterator[tuple[int, ...]]:
        """All positions of the leading dims."""
        return product(*map(range, self.shape[: self.lead]))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the files.

    Attributes:
        parts: the parameters in it, each with its position in the leading dims.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Located, tuple[int, ...]], ...]


def locate(
    config: TransformerConfig | EncoderDecoderConfig,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Located]:
    """Finds every parameter in the tables."""
    located_all: list[Located] = []
    lost: list[str] = []
    for path, shape in shapes.items():
        located = _located(config, names, path, shape)
        if located is None or len(located.inner) != len(located.form.ours):
            lost.append(path)
        else:
            located_all.append(located)
    if lost:
        raise_all(
            CheckpointError,
            f"the program is not the reference model {config.name!r}; the files have no place for",
            lost,
            hint="a program of models.build(models.load(folder))",
        )
    return located_all


def _located(
    config: TransformerConfig | EncoderDecoderConfig,
    names: Names,
    path: str,
    shape: tuple[int, ...],
) -> Located | None:
    if path in names.ends:
        return Located(path=path, shape=shape, tensor=names.ends[path], layers=None)
    for stack, table in names.stacks.items():
        match = re.fullmatch(rf"{re.escape(stack)}\.(?:blocks\.(\d+)\.)?(.+)", path)
        if match and match[2] in table:
            return Located(
                path=path,
                shape=shape,
                tensor=table[match[2]],
                layers=_numbers(config, stack, int(match[1] or 0), shape[0]),
            )
    return None


def _numbers(
    config: TransformerConfig | EncoderDecoderConfig, stack: str, block: int, count: int
) -> tuple[int, ...]:
    """Numbers of the layers of a stack: every n-th if layers of several kinds alternate, after the
    first dense ones.
    """
    if isinstance(config, EncoderDecoderConfig):
        interval, first = (
            len(
                config.pattern(
                    config.encoder_every if stack.startswith("encoder") else config.decoder_every
                )
            ),
            0,
        )
    else:
        dense = config.experts.first_dense if config.experts else 0
        interval, first = (
            (1, 0)
            if stack == "dense_layers"
            else (config.experts.every if config.experts else 1, dense)
        )
    return tuple(first + group * interval + block for group in range(count))


def stored(located: list[Located]) -> dict[str, Stored]:
    """The tensors of the files by name, in the order of layers."""
    parts: dict[str, list[tuple[Located, tuple[int, ...]]]] = {}
    for item in located:
        for place in item.places():
            parts.setdefault(item.name(place), []).append((item, place))
    ordered = sorted(
        parts,
        key=lambda name: (tuple(int(number) for number in re.findall(r"\.(\d+)\.", name)), name),
    )
    return {
        name: Stored(
            shape=parts[name][0][0].form.file_shape(parts[name][0][0].inner),
            parts=tuple(parts[name]),
        )
        for name in ordered
    }


# --------------------------------------------------------------------------------------------------
# From the tensors of files to sharded parameters: each device reads its own shard.

#: Suffixes of the paths of model state that files contain.
STATE = ("experts.bias",)


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A model read from files.

    Attributes:
        state: a training state before its first step: parameters from the files, a new optimizer
            state.
        config: the content of `config.json`.
        findings: skipped tensors, and casts to smaller dtypes.
    """

    state: TrainState
    config: TransformerConfig | EncoderDecoderConfig
    findings: tuple[Finding, ...]


def load(folder: str | Path, program: Program, *, seed: int = 0) -> Imported:
    """Reads a model into a program's layout; all islands start with the same parameters.

    Every process reads the shards of its own devices, one device's shard of one parameter at a
    time.
    """
    imported: list[Imported] = []

    def first(own: Program) -> TrainState:
        imported.append(_load(Path(folder), own, seed))
        return imported[-1].state

    state = program.init_with(first)
    return replace(imported[0], state=state)


def _load(root: Path, program: Program, seed: int) -> Imported:
    check_target(program.state)
    config, family = read_config(root / "config.json")
    table = names(config, family)
    params, state = named_leaves(program.state.params), held_state(program.state.model_state)
    located = locate(
        config, table, {path: tuple(leaf.shape) for path, leaf in {**params, **state}.items()}
    )
    with Files(folder=root) as files:
        spelling, findings = matched(files, table, stored(located), config, root)
        arrays = {
            item.path: _array(files, item, {**params, **state}[item.path], spelling)
            for item in located
        }
        findings += _smaller(files, located, {**params, **state}, spelling)
    return Imported(state=_state(program, arrays, seed), config=config, findings=findings)


def read_config(path: Path) -> tuple[TransformerConfig | EncoderDecoderConfig, str]:
    """A configuration and its `model_type`."""
    config = huggingface.read(path)
    return (
        config,
        read_json(path, "model configuration", ModelError, limits=huggingface.CONFIG)["model_type"],
    )


def held_state(model_state: Tree) -> dict[str, Tree]:
    """The leaves of a model's state that files contain, by path."""
    return {path: leaf for path, leaf in named_leaves(model_state).items() if path.endswith(STATE)}


def matched(
    files: Files,
    table: Names,
    expected: Mapping[str, Stored],
    config: TransformerConfig | EncoderDecoderConfig,
    folder: Path,
) -> tuple[dict[str, str], tuple[Finding, ...]]:
    """Our spelling of names -> the files', and findings about skipped tensors."""
    spelling = {
        name: spelled
        for name in expected
        if (spelled := next((s for s in _spellings(table, name) if s in files.tensors), None))
    }
    problems = [
        f"{name} {list(tensor.shape)} is missing"
        for name, tensor in expected.items()
        if name not in spelling
    ]
    for name, spelled in spelling.items():
        shape, dtype = files.tensors[spelled]
        if shape != expected[name].shape:
            problems.append(
                f"{spelled} is {list(shape)}, the program needs {list(expected[name].shape)}"
            )
        elif dtype not in DTYPES:
            problems.append(f"{spelled} has dtype {dtype}; known are {', '.join(DTYPES)}")
    over = sorted(set(files.tensors) - set(spelling.values()))
    passed = [name for name in over if _is_passed_over(name, table, config)]
    problems += [
        f"{name} {list(files.tensors[name][0])} is in the files alone"
        for name in over
        if name not in passed
    ]
    if problems:
        shown = (
            problems if len(problems) <= 40 else [*problems[:40], f"and {len(problems) - 40} more"]
        )
        raise_all(
            CheckpointError,
            f"the files in {folder} do not fit the program",
            shown,
            hint="a program of models.build(models.load(folder)), and all files of the folder",
        )
    finding = Finding(
        code="tensors-passed-over",
        severity="info",
        where=shortened(passed),
        message=(
            f"{len(passed)} tensors of {folder} are not parameters of the model and were passed"
            " over."
        ),
    )
    return spelling, (finding,) if passed else ()


def _spellings(table: Names, name: str) -> list[str]:
    """The possible spellings of a name in files, the usual one first."""
    usual, *others = table.starts
    if not name.startswith(usual) or not others:
        return [name, name.replace("lm_head.", "language_model.lm_head.")]
    return [name, *(start + name.removeprefix(usual) for start in others)]


def _is_passed_over(
    name: str, table: Names, config: TransformerConfig | EncoderDecoderConfig
) -> bool:
    """True for buffers, heads tied to the embedding, encoders of other modalities, and
    multi-token-prediction layers (DeepSeek V3).
    """
    if name.endswith(table.ignored) or any(
        word in name for word in ("vision_tower.", "multi_modal_projector.")
    ):
        return True
    beyond = isinstance(config, TransformerConfig) and name.startswith(
        f"model.layers.{config.layers}."
    )
    return beyond or (config.tied and name.endswith("lm_head.weight"))


def _array(files: Files, located: Located, leaf: Any, spelling: Mapping[str, str]) -> jax.Array:
    """One parameter, assembled on its devices; devices with the same shard share one read."""
    by_part: dict[Any, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        part = tuple(
            index_of_dim.indices(size)[:2]
            for index_of_dim, size in zip(index, leaf.shape, strict=True)
        )
        by_part.setdefault(part, []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    for part, devices in by_part.items():
        read = read_part(files, located, part, np.dtype(leaf.dtype), spelling)
        shards |= {device: jax.device_put(read, device) for device in devices}
    return jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, list(shards.values()), dtype=leaf.dtype
    )


def read_part(
    files: Files,
    located: Located,
    part: tuple[tuple[int, int], ...],
    dtype: np.dtype,
    spelling: Mapping[str, str],
) -> np.ndarray:
    """A part of one of our parameters.

    Args:
        dtype: of the result.
        spelling: our names -> the files'.
    """
    lead, inner = part[: located.lead], part[located.lead :]
    out = np.empty([stop - start for start, stop in part], dtype)
    for place in np.ndindex(*(stop - start for start, stop in lead)):
        name = located.name(tuple(start + i for (start, _), i in zip(lead, place, strict=True)))
        out[place] = located.form.ours_from(
            files.read(spelling[name], located.form.places(located.inner, inner)), inner
        )
    return out


def _smaller(
    files: Files, located: list[Located], leaves: Mapping[str, Any], spelling: Mapping[str, str]
) -> tuple[Finding, ...]:
    """A finding for parameters whose dtype cannot represent all numbers of the files."""
    cast: list[str] = []
    for item in located:
        stored_dtype, dtype = (
            np.dtype(DTYPES[files.tensors[spelling[item.name((0,) * item.lead)]][1]]),
            np.dtype(leaves[item.path].dtype),
        )
        if jnp.promote_types(stored_dtype, dtype) != dtype:
            cast.append(f"{item.path} {stored_dtype} -> {dtype}")
    finding = Finding(
        code="import-dtype",
        severity="warning",
        where=shortened(cast),
        message=(
            f"{len(cast)} parameters have a dtype that cannot hold all numbers of the files and"
            " were rounded."
        ),
    )
    return (finding,) if cast else ()


def _state(program: Program, arrays: Mapping[str, jax.Array], seed: int) -> TrainState:
    """The state with these parameters; optimizer and model state that files do not contain is
    initialised in its layout.
    """
    template = program.state
    params = jax.tree.structure(template.params).unflatten(
        [arrays[path] for path in named_leaves(template.params)]
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (template.step, template.model_state))
    step, fresh = jax.jit(
        lambda: (jnp.int32(0), program.model.init(seed)[1]), out_shardings=shardings
    )()
    leaves = [
        arrays.get(path, leaf) if path.endswith(STATE) else leaf
        for path, leaf in named_leaves(fresh).items()
    ]
    return program.anew(
        TrainState(
            step=step,
            params=params,
            model_state=jax.tree.structure(fresh).unflatten(leaves),
            opt_state=(),
        )
    )


# --------------------------------------------------------------------------------------------------
# Writing of files one by one: each tensor is assembled on the host, written, and released.

#: Our dtypes -> the files'.
WORDS = {dtype: word for word, dtype in DTYPES.items()}


class Gather:
    """Copies one layer's or one expert's part of a parameter to the host; with several processes it
    is first all-gathered over the mesh.
    """

    def __init__(self, mesh: Mesh | AbstractMesh | None) -> None:
        replicated = None
        if mesh is not None and jax.process_count() > 1:
            replicated = NamedSharding(mesh, PartitionSpec())
        self._part = jax.jit(_part, static_argnums=2, out_shardings=replicated)

    def __call__(self, leaf: jax.Array, place: tuple[int, ...]) -> np.ndarray | None:
        part = self._part(leaf, np.asarray(place, np.int32), len(place))
        array = part if 0 in owners_of([part]) else whole(part)
        return np.asarray(array) if jax.process_index() == 0 else None


def _part(leaf: jax.Array, place: jax.Array, dims: int) -> jax.Array:
    for i in range(dims):
        leaf = jax.lax.dynamic_index_in_dim(leaf, place[i], keepdims=False)
    return leaf


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[Stored, str]],
    leaves: Mapping[str, jax.Array],
    gather: Gather,
    first: bool,
) -> None:
    """Writes one file: the length of the header, the header, the tensors in order; renamed when it
    is complete.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (tensor, dtype) in tensors.items():
        start, end = end, end + int(np.prod(tensor.shape)) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": WORDS[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
    if not first:
        for tensor, dtype in tensors.values():
            _tensor(tensor, dtype, leaves, gather)
        return
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor, dtype in tensors.values():
            _append(file, _tensor(tensor, dtype, leaves, gather))
    os.replace(partial, path)


def _append(file: BinaryIO, tensor: np.ndarray) -> None:
    file.write(np.ascontiguousarray(tensor).view(np.uint8).data)


def _tensor(
    target: Stored, dtype: str, leaves: Mapping[str, jax.Array], gather: Gather
) -> np.ndarray:
    tensor = np.empty(target.shape, np.dtype(dtype))
    for located, place in target.parts:
        part = gather(leaves[located.path], place)
        if part is not None:
            located.form.into(tensor, part.astype(tensor.dtype))
    return tensor


def load_weights(
    folder: str | Path, model: Model, config: TransformerConfig | EncoderDecoderConfig, family: str
) -> tuple[Tree, Tree]:
    """Reads a model: (params, state), NumPy arrays on the host.

    Args:
        config: the content of `config.json`, with the dtypes of the model.
    """
    root = Path(folder)
    table = names(config, family)
    params, state_leaves = named_leaves(model.params), held_state(model.state)
    leaves = {**params, **state_leaves}
    located = locate(config, table, {path: tuple(leaf.shape) for path, leaf in leaves.items()})
    with Files(folder=root) as files:
        spelling, _ = matched(files, table, stored(located), config, root)
        arrays = {
            item.path: read_part(
                files,
                item,
                tuple((0, size) for size in item.shape),
                np.dtype(leaves[item.path].dtype),
                spelling,
            )
            for item in located
        }
    fresh = jax.jit(lambda: model.init(0)[1])()
    state = [
        arrays[path] if path.endswith(STATE) else leaf for path, leaf in named_leaves(fresh).items()
    ]
    return (
        jax.tree.structure(model.params).unflatten([arrays[path] for path in params]),
        jax.tree.structure(fresh).unflatten(state),
    )


# --------------------------------------------------------------------------------------------------
# From sharded parameters to files, tensor by tensor.


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One file to be written.

    Attributes:
        tensors: names of its tensors, in order.
    """

    name: str
    tensors: tuple[str, ...]


def save(
    program: Program,
    state: TrainState,
    folder: str | Path,
    *,
    config: str | Path,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
) -> tuple[str, ...]:
    """Writes a model as safetensors files and `config.json`.

    Must be called by every process; the first one writes. The host holds one tensor of one layer at
    a time.

    Args:
        dtype: "float32", "bfloat16", "float16"; by default that of each parameter.
        max_bytes: size of a file, which only a single tensor may exceed.
    """
    trained = program.learned(state)
    read_config(Path(config))
    return _save(
        (trained.params, trained.model_state),
        Path(folder),
        read_json(Path(config), "model configuration", ModelError, limits=CONFIG),
        gather=Gather(program.loss_program.mesh),
        dtype=dtype,
        max_bytes=max_bytes,
    )


def save_weights(
    weights: tuple[Tree, Tree],
    folder: str | Path,
    config: JsonMapping,
    *,
    dtype: str | None = None,
    max_bytes: int = 5_000_000_000,
) -> tuple[str, ...]:
    """Writes the weights of a served model, like `save`.

    Args:
        dtype: "float32", "bfloat16", "float16"; by default that of each parameter.
        max_bytes: size of a file, which only a single tensor may exceed.
    """
    return _save(
        weights, Path(folder), config, gather=Gather(None), dtype=dtype, max_bytes=max_bytes
    )


def _save(
    weights: tuple[Tree, Tree],
    root: Path,
    config: JsonMapping,
    *,
    gather: Gather,
    dtype: str | None,
    max_bytes: int,
) -> tuple[str, ...]:
    described, family = huggingface.read(config), config["model_type"]
    leaves = {**named_leaves(weights[0]), **held_state(weights[1])}
    if dtype is not None and dtype not in WORDS:
        raise CheckpointError(
            f"dtype={dtype!r} is not a dtype of such files\nTry: one of {', '.join(WORDS)}"
        )
    tensors = stored(
        locate(
            described,
            names(described, family),
            {path: tuple(leaf.shape) for path, leaf in leaves.items()},
        )
    )
    dtypes = {
        name: dtype or str(leaves[tensor.parts[0][0].path].dtype)
        for name, tensor in tensors.items()
    }
    shards = _shards(
        {
            name: int(np.prod(tensor.shape)) * np.dtype(dtypes[name]).itemsize
            for name, tensor in tensors.items()
        },
        max_bytes,
    )
    first = jax.process_index() == 0
    if first:
        _prepare(root)
    try:
        for shard in shards:
            write_file(
                root / shard.name,
                {name: (tensors[name], dtypes[name]) for name in shard.tensors},
                leaves,
                gather,
                first,
            )
        if first:
            _describe(root, config, shards, tensors, dtypes, dtype)
    except OSError as error:
        raise CheckpointError(
            f"the model could not be written to {root} ({error})\nTry: a folder with more room; the"
            " state is as before"
        ) from error
    return tuple(shard.name for shard in shards)


def _prepare(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        there = sorted(
            path.name
            for path in root.iterdir()
            if path.suffix == ".safetensors" or path.name in (INDEX, "config.json")
        )
    except OSError as error:
        raise CheckpointError(
            f"files cannot be written to {root} ({error})\nTry: another folder"
        ) from error
    if there:
        raise CheckpointError(
            f"{root} holds {', '.join(there[:5])} already; nothing is overwritten\nTry: an empty"
            " folder"
        )


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[_Shard]:
    """Distributes tensors over files in order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return [_Shard(name="model.safetensors", tensors=tuple(groups[0]))]
    return [
        _Shard(name=f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors", tensors=tuple(group))
        for i, group in enumerate(groups)
    ]


def _describe(
    root: Path,
    data: JsonMapping,
    shards: list[_Shard],
    tensors: Mapping[str, Stored],
    dtypes: Mapping[str, str],
    dtype: str | None,
) -> None:
    """Writes `config.json`, and the index if there are several files."""
    (root / "config.json").write_text(
        json.dumps({**data, **({"dtype": dtype, "torch_dtype": dtype} if dtype else {})}, indent=2)
        + "\n",
        encoding="utf-8",
    )
    if len(shards) > 1:
        total = sum(
            int(np.prod(tensor.shape)) * np.dtype(dtypes[name]).itemsize
            for name, tensor in tensors.items()
        )
        weight_map = {name: shard.name for shard in shards for name in shard.tensors}
        (root / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            + "\n",
            encoding="utf-8",
        )
