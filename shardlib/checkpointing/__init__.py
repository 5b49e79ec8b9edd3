"""What survives a training run: checkpoints that restore under any plan, and the safetensors of
Hugging Face.

`store.Checkpoints` keeps training states in a folder; `huggingface` reads and writes the parameters
of reference models; `foreign` reads those of a model of one's own, and adapters of PEFT.

elastic.py      checkpoints that go on as another number of islands than were saved, or as
                islands that meet in another way
folder.py       the folder of checkpoints
foreign.py      models of one's own beside files of Hugging Face, and adapters in the format of
                PEFT
huggingface.py  the parameters of reference models as the safetensors files of Hugging Face, read
                and written shard by shard
islands.py      states of several islands in checkpoints
reading.py      A checkpoint read
store.py        checkpoints of training states in a folder
tree.py         A training state as named arrays, and what two of them do not have in common
"""
