"""Models of Triton's repository, copied by an export; each file runs alone.

arrays.py     arrays and texts between requests and programs
forward.py    runs an artefact of `jax.export`
generate.py   A language model
normalise.py  vectors to vectors of length 1
tokenize.py   texts to rows of tokens of one length, padded with zeros, and how many there are
"""
