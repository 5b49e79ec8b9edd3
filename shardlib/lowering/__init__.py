"""From a plan to programs that XLA compiles.

Reading order: `mesh` and `runtime` are devices and arrays; `uses` finds the parameter uses and
custom calls of a loss; `contractions`, `weights`, `context`, `experts` and `collective_matmul`
lower its operations; `loss` puts the plan's layouts into it; `accumulation`, `pipeline` and `disk`
are ways to drive a step; `program` is the compiled program that users call.

Terms of a traced loss:

program        `tracing.program.Program` is a flattened jaxpr; `lowering.program.Program` what a
               user gets
number         of a value: its variable in a flattened program (`shardlib.tracing.program`)
enter, exit    in a path: the slice of a scan's xs ("4/enter/0"), and of its ys
carry, final   in a path: the carry of a scan in its body, and after its last iteration
use            an operation that reads a parameter: contraction, lookup, slice or addition (`Use`)
view           a value with the elements of a parameter, or of one layer of it (`View`)
call site      a custom call in a loss, which is lowered as a whole (`CallSite`)
facts          uses, custom calls and loops that are read from a traced loss (`LossFacts`)
walk           callbacks with which a program is evaluated again (`Walk`)

Terms of layouts and gradients:

value layouts  by path of an equation and index of its result, the layout of that value
physical axes  the names of a mesh axis in a program: one per torus dim that the axis spans
regions        manual regions of a mesh (`jax.shard_map`), and the form of their collectives
partial sums   the gradient of a weight from one device's examples, before it is reduced
deferred       of gradients: partial sums that are reduced after several microbatches
pieces         of a fused dim: queries, keys and values of one weight, for example
interleaving   the order q0 q1 k0 k1 | q2 q3 k2 k3 of pieces q and k on two devices, each of which
               then has its part of every piece (`Interleaving`)
cut, dealt     a sequence sharded over a mesh axis (`Cut`); an array whose sequence is in the order
               of the devices

Terms of microbatches:

whole batch    the global batch, of which microbatches are parts
contribution   the loss of a microbatch, changed so that the mean over microbatches is the loss of
               the whole batch
draw           random numbers of one operation (`random_bits`)
fold           a key of the whole batch, folded with the number of the microbatch
piece          of a step with state on disk: the update of some arrays, compiled by itself

Terms of pipelines:

sections       of a loss: before, in and after its loop over layers (`SplitLoss`)
outside        computed before or after the layers: embedding, head, loss
per step       of values: computed once per step, from parameters or constants alone
chunk, slot    consecutive layers that a stage runs at once; storage of one chunk or microbatch
micro          index of a microbatch
tick, table    the time of one chunk's work on one microbatch; the schedule of all ticks
round          the ticks in which every stage starts one of its chunks (of experts: an exchange of
               as many rows as messages have room for)
stack          the layers of a parameter, [layers, ...]; also their gradients
arrays         those of a stage that stay the same through a step (`StageArrays`, `ChunkInputs`)
entering       activations that the first stage or a chunk gets; `leaving` are read after the layers
pregathered    of operands of matmuls: all-gathered before the ticks (`gather="once"` in a plan)
stash          residuals of a chunk's forward pass that wait for its backward pass
residuals      of a backward pass in two halves: what the input-gradient half keeps for the
               weight-gradient half
early, late    the sums of a chunk that are updated with input gradients; with weight gradients

Methods of a program with names of their own: `learned` gives the state that evaluations and exports
read (for islands, with the outer parameters), `anew` a state with its optimizer as before the first
step.

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
loss_layouts.py       layouts of the values of a traced loss, and replacements of its operations
mesh.py               the device mesh, shardings of parameters and state on it
pipeline/             a loop over layers as a pipeline
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
