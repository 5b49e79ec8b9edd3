"""Models of one's own beside files of Hugging Face, and adapters in the format of PEFT.

    names = learn_names(program.state.params, tensors_of("folder"))
    print(names)                                  # what is read from where, before it is used
    state = read_weights("folder", program, names)

learned.py   names of tensors for the parameters of any model, from shapes and paths
words.py     the words in which libraries name the same thing
forms.py     how an array lies in a tensor
weights.py   the parameters read
peft.py      adapters written and read
"""

from __future__ import annotations

from shardlib.checkpointing.foreign.learned import LearnedNames, learn_names
from shardlib.checkpointing.foreign.peft import read_adapter, write_adapter
from shardlib.checkpointing.foreign.weights import read_weights, tensors_of

__all__ = [
    "LearnedNames",
    "learn_names",
    "read_adapter",
    "read_weights",
    "tensors_of",
    "write_adapter",
]
