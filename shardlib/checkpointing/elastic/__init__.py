"""Checkpoints that go on as another number of islands than were saved.

other_number.py  the state of islands that start anew from what was outer
source.py        the checkpoint that is read for it
origins.py       where an array of one island comes from, and how those of several become one
"""
