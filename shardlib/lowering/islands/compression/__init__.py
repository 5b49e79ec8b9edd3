"""Gradients that cross between islands in every step, compressed.

An island's step in two halves, its gradients and its update; between them a program over the
devices of all islands that compresses, exchanges, and keeps what was not sent:

    program.py    what a user holds
    matrices.py   which parameters are matrices, and how they are sharded
    low_rank.py   PowerSGD
    sparse.py     the largest numbers alone
    few_bits.py   blocks of integers, and signs
    exchange.py   the exchange as a compiled program
    step.py       a step: gradients, exchange, update
"""
