"""What computes the steps of an engine.

built.py      a user's model as what computes steps
adapters.py   adapters of one base
drafts.py     tokens that are guessed ahead
drafting.py   a model that guesses
sources.py    what an encoder made of a source
slotted.py    models with a cache of their own, one a slot
"""
