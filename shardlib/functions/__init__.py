"""What can a model call that is lowered in another form than it is written?

    marks.py      a call that lowering finds again
    attention.py  attention, which becomes a ring where the sequence is cut

A function here is what one device computes. It is a marked call: planning sees the operations inside; lowering puts a program for many devices in its place, with the same results.
"""
