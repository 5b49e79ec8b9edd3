"""What is served: a model with its weights, its tokenizer and its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from shardlib.annotation.model import Tree
from shardlib.annotation.read import Init
from shardlib.lowering.serving.program import Forward
from shardlib.models.config import TransformerConfig
from shardlib.serving.engine import Engine
from shardlib.serving.scheduling.capacity import Capacity
from shardlib.serving.scheduling.settings import Sampling
from shardlib.serving.text import Text

#: Weights that are newer than those of a version, and their version; None where there are none.
Newer = Callable[[str], tuple[Tree, str] | None]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served.

    Attributes:
        name: by which requests ask for it.
        init: what makes the model, as `Engine` takes it.
        forward: (model, int32 tokens [batch, seq]) -> logits [batch, seq, vocab].
        weights: as `Engine` takes them.
        longest: tokens that the model looks at.
        text: its tokenizer.
        hidden: (model, int32 tokens [batch, seq]) -> states [batch, seq, width] before the logits,
            which embeddings are made of; None where the model does not give them.
        version: of the weights, in words; empty where they have none.
        newer: asks for newer weights; None where there never are any.
        config: of the reference transformer; None for other models.
        sampling: how answers are made unless somebody asks otherwise; None where nothing is said.
        warning: what whoever starts the server should know; empty for nothing.
    """

    name: str
    init: Init
    forward: Forward
    weights: Tree | int
    longest: int
    text: Text
    hidden: Forward | None = None
    version: str = ""
    newer: Newer | None = None
    config: TransformerConfig | None = None
    sampling: Sampling | None = None
    warning: str = ""

    def engine(
        self,
        capacity: Capacity,
        *,
        tensor: int = 1,
        data: int = 1,
        devices: Sequence[jax.Device] | None = None,
    ) -> Engine:
        """An engine that serves it."""
        return Engine(
            self.init,
            self.forward,
            weights=self.weights,
            capacity=capacity,
            tensor=tensor,
            data=data,
            devices=devices,
        )
