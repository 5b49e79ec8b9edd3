"""From a plan to programs that XLA compiles.

Reading order: `mesh` and `runtime` are devices and arrays; `uses` finds the parameter uses and
custom calls of a loss; `contractions`, `weights`, `context`, `experts` and `collective_matmul`
lower its operations; `loss` puts the plan's layouts into it; `accumulation`, `pipeline` and `disk`
are ways to drive a step; `program` is the compiled program that users call.

accumulation.py       gradient accumulation over microbatches, and the contribution of each to the
                      loss of the whole batch
checks.py             checks before anything is lowered or run
collective_matmul.py  collectives over the tensor axis hidden behind the matmuls that they feed
collectives.py        collectives of manual regions, and the dtypes of a step
context/              attention of a sequence that is sharded over a mesh axis
contractions.py       contractions in the layouts of a plan, forward and backward
disk.py               optimizer state stored on disk
experts.py            expert parallelism: dispatch and combine of tokens
loss.py               the user's loss with the plan's layouts in it
mesh.py               the device mesh, shardings of parameters and state on it
pipeline/             a loop over layers as a pipeline
placing.py            layouts of the values of a traced loss, and replacements of its operations
plain.py              the runtime of plain JAX files that carry out a plan
program.py            the compiled program that users hold
random_keys.py        random keys in a batch, divided among microbatches
runtime.py            training state, compiled executables, checksums of arrays, batches
step.py               a training step: storage, gradients, guards, loss scale, update; and
                      evaluation
training_program.py   the protocol of programs that train
uses.py               uses of the parameters of a traced loss
weights.py            gathered weights, partial sums of gradients, and their reduction
"""
