"""The parameters of a folder as arrays of this process, for a model that is served: no program, no
optimizer.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from shardlib.annotation.model import Model
from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.huggingface.files import Files
from shardlib.checkpointing.huggingface.located import locate, stored
from shardlib.checkpointing.huggingface.names import names
from shardlib.checkpointing.huggingface.reading import STATE, held_state, matched, read_part
from shardlib.checkpointing.tree import named_leaves
from shardlib.models.config import TransformerConfig
from shardlib.models.encoder_decoder_config import EncoderDecoderConfig


def load_weights(
    folder: str | Path,
    model: Model,
    config: TransformerConfig | EncoderDecoderConfig,
    family: str,
) -> tuple[Tree, Tree]:
    """Reads a model: (params, state), NumPy arrays on the host.

    Args:
        config: what `config.json` says, in the dtypes of the model.
    """
    root = Path(folder)
    table = names(config, family)
    params, held = named_leaves(model.params), held_state(model.state)
    leaves = {**params, **held}
    located = locate(config, table, {path: tuple(leaf.shape) for path, leaf in leaves.items()})
    with Files(folder=root) as files:
        spelling, _ = matched(files, table, stored(located), config, root)
        arrays = {
            one.path: read_part(
                files,
                one,
                tuple((0, size) for size in one.shape),
                np.dtype(leaves[one.path].dtype),
                spelling,
            )
            for one in located
        }
    fresh = jax.jit(lambda: model.init(0)[1])()
    state = [
        arrays[path] if path.endswith(STATE) else leaf for path, leaf in named_leaves(fresh).items()
    ]
    return (
        jax.tree.structure(model.params).unflatten([arrays[path] for path in params]),
        jax.tree.structure(fresh).unflatten(state),
    )
