"""Training data: files of text or of tokens, on this machine or far away, as batches that are a
function of their position alone.

    dataset = read("books/", seq=2048)  # tokenises once, into a folder of this machine
    with Loader(dataset, program.batch, start=0) as loader:
        for step, batch in loader:
            state, metrics = program.step(state, batch)

Position counts examples from the beginning of training. It does not depend on processes, devices or
meshes, so that a run goes on at any step with any number of them.

batches.py  examples in a reproducible order, packed into rows, as batches on devices
open.py     one function from a path to batches
sources.py  files of text, records and tokens, near or far, read through a bounded cache
tokens.py   documents as tokens on disk
"""
