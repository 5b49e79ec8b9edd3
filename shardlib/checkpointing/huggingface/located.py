"""The tensors of the files that hold each part of a model's parameters: the tables of names,
unrolled for one model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from shardlib.checkpointing.huggingface.form import Form
from shardlib.checkpointing.huggingface.names import Names, Tensor
from shardlib.errors import CheckpointError, raise_all
from shardlib.models.config import TransformerConfig
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig


@dataclass(frozen=True, kw_only=True)
class Located:
    """One parameter of ours and where its parts are.

    Attributes:
        path: of the parameter, with dots.
        shape: of the whole parameter; dims of layers and experts come first.
        tensor: the row of the table.
        layers: number in the files of each layer of the parameter's first dim; None where it has no
            such dim.
    """

    path: str
    shape: tuple[int, ...]
    tensor: Tensor
    layers: tuple[int, ...] | None

    @property
    def lead(self) -> int:
        """How many dims are of layers and experts."""
        return (self.layers is not None) + ("{expert}" in self.tensor.name)

    @property
    def form(self) -> Form:
        """How the other dims lie in a tensor."""
        return self.tensor.form

    @property
    def inner(self) -> tuple[int, ...]:
        """The other dims."""
        return self.shape[self.lead :]

    def name(self, place: tuple[int, ...]) -> str:
        """Name of the tensor that holds the part at a place of the first dims."""
        numbers = list(place)
        layer = self.layers[numbers.pop(0)] if self.layers is not None else 0
        return self.tensor.name.format(layer=layer, expert=numbers[0] if numbers else 0)

    def places(self) -> Iterator[tuple[int, ...]]:
        """All places of the first dims."""
        return product(*map(range, self.shape[: self.lead]))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor of the files.

    Attributes:
        shape: its dims.
        parts: the parameters that lie in it, each with the place of its first dims.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Located, tuple[int, ...]], ...]


def locate(
    config: TransformerConfig | EncoderDecoderConfig,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Located]:
    """Finds every parameter in the tables."""
    found: list[Located] = []
    lost: list[str] = []
    for path, shape in shapes.items():
        located = _located(config, names, path, shape)
        if located is None or len(located.inner) != len(located.form.ours):
            lost.append(path)
        else:
            found.append(located)
    if lost:
        raise_all(
            CheckpointError,
            f"the program is not the reference model {config.name!r}; the files have no place for",
            lost,
            hint="a program of models.build(models.load(folder))",
        )
    return found


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
    """Numbers of the layers of a stack: one of every few where layers of several kinds take turns,
    after the first dense ones.
    """
    if isinstance(config, EncoderDecoderConfig):
        every, first = (
            len(
                config.pattern(
                    config.encoder_every if stack.startswith("encoder") else config.decoder_every
                )
            ),
            0,
        )
    else:
        dense = config.experts.first_dense if config.experts else 0
        every, first = (
            (1, 0)
            if stack == "dense_layers"
            else (config.experts.every if config.experts else 1, dense)
        )
    return tuple(first + group * every + block for group in range(count))


def stored(located: list[Located]) -> dict[str, Stored]:
    """The tensors of the files by name, in the order of layers."""
    parts: dict[str, list[tuple[Located, tuple[int, ...]]]] = {}
    for one in located:
        for place in one.places():
            parts.setdefault(one.name(place), []).append((one, place))
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
