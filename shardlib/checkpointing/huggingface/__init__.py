"""The parameters of reference models as the safetensors files of Hugging Face, read and written
shard by shard.

    # A training state: parameters from the files, a new optimizer.
    imported = load("Llama-3.1-8B", program)
    save(program, imported.state, "out", config="Llama-3.1-8B/config.json")

Neither a device nor a host ever holds the model: what is read at once is the part of one parameter
that one device keeps, what is written at once is one tensor of one layer.
"""

from __future__ import annotations

from shardlib.checkpointing.huggingface.reading import Imported, load
from shardlib.checkpointing.huggingface.whole import load_weights
from shardlib.checkpointing.huggingface.writing import save, save_weights

__all__ = ["Imported", "load", "load_weights", "save", "save_weights"]
