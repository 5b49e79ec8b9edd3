"""The main activations of a step, and how they are sharded.

They are read off the step graph that was priced: the residual stream of every layer group, what
goes into matmuls of weights and comes out of them, and what goes into kernels of attention and
comes out. Gradients of activations are listed where they are moved.

    x [batch, seq_tensor, embed] --all-gather--> [batch, seq, embed]
    x W = h [batch, seq, mlp_tensor]
    h V = partial sums [batch, seq, embed] --reduce-scatter--> [batch, seq_tensor, embed]

step_layouts.py   how values of a step graph are sharded under a choice on a mesh
of_attention.py   what kernels of attention read and make
listing.py        the list
"""
