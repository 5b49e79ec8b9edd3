"""Custom calls: functions of a model that lowering replaces by a sharded program.

As written, a function computes on one device. Attention and experts are custom calls: planning sees
the operations inside; lowering replaces them by a program for many devices with the same results.

attention.py  attention: a custom call, its biases, and its checks
experts.py    mixtures of experts, vendors' kernels, and axes of `jax.pmap`
losses.py     a loss that a step marks with `shardlib.value_and_grad`
routing.py    routing of tokens to experts, and balancing of their load
"""
