"""Custom calls: functions of a model that are lowered in another form than they are written.

A function here is what one device computes. Attention and experts are custom calls: planning sees
the operations inside; lowering puts a program for many devices in their place, with the same
results.

attention.py  attention: a custom call, its biases, and its checks
experts.py    mixtures of experts, vendors' kernels, and axes of `jax.pmap`
losses.py     a loss that a step marks with `shardlib.value_and_grad`
routing.py    routing of tokens to experts, and balancing of their load
"""
