"""What a model computes, as files that programs without shardlib run.

single.py   a pass over a batch: inputs, outputs, weights
written.py  a pass as an artefact of `jax.export`, with its weights beside it
"""
