"""Checkpoints that restore under any plan, and the safetensors of Hugging Face.

`store.Checkpoints` keeps training states in a folder; `huggingface` reads and writes the parameters
of reference models; `foreign` reads those of a user's own model, and adapters of PEFT.

folder.py       the folder of checkpoints, and its owner
foreign.py      users' own models from files of Hugging Face, and adapters in the format of PEFT
huggingface.py  the parameters of reference models as the safetensors files of Hugging Face, read
                and written shard by shard
store.py        checkpoints of training states in a folder
tree.py         training states as named arrays
"""
