"""From a plan to programs that XLA compiles.

Read from top to bottom: `mesh` and `runtime` are devices and arrays; `reading` knows the parameter
uses and custom calls of a loss; `weights`, `context`, `experts` and `collective_matmul` lower its
operations; `loss` puts the plan's layouts into it; `accumulation`, `pipeline` and `host_memory` are
ways to drive a step; `program` is what a user holds.

accumulation.py       gradient accumulation over microbatches, with gradients reduced in each or
                      once a step
checks.py             what is checked before anything is lowered or run
collective_matmul.py  how are collectives over the tensor axis hidden behind the matmuls that
                      they feed (collective matmul)?
collectives.py        how do manual regions and explicit gathers speak of the mesh?
context/              attention of a sequence that is sharded over a mesh axis
contractions.py       how does a contraction run in the layouts that were chosen for it, forward
                      and backward?
contribution.py       what a microbatch contributes to the loss of the whole batch, and the
                      program that computes it
disk.py               optimizer state that rests in files
experts.py            tokens are dispatched to experts on other devices, and their results
                      combined
gradients.py          an operation on a weight, with the weight gathered and its gradient reduced
                      in every run
islands/              islands that train apart, and meet
loss.py               the user's loss with the plan's layouts in it
mesh.py               the device mesh, shardings of every array on it, communication in manual
                      regions, and the dtypes of a step
offload.py            what rests in host memory, and how does it get to the device and back?
pipeline/             A loop over layers as a pipeline
placing.py            how the values of a traced loss are laid out, and what runs in place of its
                      operations
plain.py              A plan as a file of plain JAX
program.py            what a user holds after compiling
random_keys.py        what is done with random keys in a batch?
runtime.py            what runs and what it runs on
step.py               the second half of a step, after its gradients
steps.py              A step that a user wrote, run under a plan
uses.py               what a traced loss does with its parameters
weights.py            how an operation gets a sharded weight, and how the gradient of that weight
                      is reduced
"""
