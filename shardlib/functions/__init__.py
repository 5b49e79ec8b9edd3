"""What can a model call that is lowered in another form than it is written?

    marks.py        a call that lowering finds again
    routing.py      which experts does a token visit, and how is their load balanced?
    experts.py      tokens visit their experts, which may be on other devices
    activations.py  activations by name

A function here is what one device computes. It is a marked call: planning sees the operations inside; lowering puts a program for many devices in its place, with the same results.
"""
