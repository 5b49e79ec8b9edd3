"""Custom calls: functions of a model that are lowered in another form than they are written.

    marks.py        a call that lowering finds again
    attention.py    tokens look at tokens; becomes a ring where the sequence is sharded
    biases.py       what distances add to scores of attention
    experts.py      tokens visit experts; become exchanges where experts are on other devices
    routing.py      which experts, and the losses that keep them equally busy
    activations.py  the functions in the middle of an expert
    losses.py       the loss of a step that calls `shardlib.value_and_grad`

A function here is what one device computes. Attention and experts are custom calls: planning sees
the operations inside; lowering puts a program for many devices in their place, with the same
results.

"""
