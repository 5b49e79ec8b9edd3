"""What survives a training run: checkpoints that restore under any plan, and the safetensors of
Hugging Face.

`store.Checkpoints` keeps training states in a folder; `huggingface` reads and writes the parameters
of reference models; `foreign` reads those of a model of one's own, and adapters of PEFT.

"""
