"""Checkpoints that go on as another number of islands than were saved, or
as islands that meet in another way.

other_number.py  the state of islands that start anew from what was outer
told.py          what that changes, in words
source.py        the checkpoint that is read for it
origins.py       where an array of one island comes from, and how those of several become one
"""
