"""A model as a repository of NVIDIA Triton.

config.py      config.pbtxt
repository.py  the folders of a repository, for single passes and for language models
models/        model.py of each, as Triton's Python backend runs them: they are copied
"""
