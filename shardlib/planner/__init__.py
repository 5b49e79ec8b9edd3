"""The plan, the space of candidates, the search and questions about its answer; no JAX.

Terms, in the order of a search:

workload     a problem prepared for pricing: its colours and its cost programs
cost program one way to run a step (remat policy, tokens routed or not), as cost items
colour       dims of all arrays that are sharded together (`shardlib.propagation.colours`)
component    colours that some op ties together; costs are sums over components
choice       the sharded colours, with or without sequence parallelism
segment      a layer group, the values inside one layer, or what is outside of the layers:
             embedding, head and loss (`shardlib.cost.terms`)
phase        a loop over layers, or the ops between two (`shardlib.cost.facts`)
degrees      sizes of the mesh axes with a number of microbatches: what divides an amount; many
             candidates share them (`shardlib.cost.terms.Degrees`); by index in `degrees_index`
tally        quantities of a program under a choice, as a matrix times measures of degrees
stored       kept between steps: parameters, optimizer state, accumulated gradients
abilities    what a training framework supports; without limits for programs of shardlib
entry        a mesh with a number of microbatches
pair         an entry under a choice
candidate    in arrays an entry, placed (`Meshes`) or not yet; a `Candidate` is all decisions of
             one plan
row          a placed entry under a choice; of a tally: a quantity
corner       a remat policy for each layer group
mixture      a plan between corners: each policy in some of the layers
footprint    lower bounds on the bytes of a candidate
certificate  what proves that no plan of the space is faster (`Search`)
accumulation groups  groups of microbatches that go through a pipeline one after the other; the
             decision `accumulation` is their number
bubble       waiting time of a stage, in units of its busy time per microbatch
routed       tokens are sent to the devices that have their experts
breadth first  all microbatches go through one chunk of layers before the next
slack        largest step time of the plans of a ranking, in multiples of the fastest
left out     colours beyond those of which every set is tried
landscape    the priced plans, thinned to representative points of time and memory
Pareto front the plans that fit and need less memory than every faster one
incumbent    the best plan that was priced so far

answers.py        values that answer questions about a plan
assembly.py       from a priced candidate to a plan
bounds.py         lower bounds on memory and step time
findings.py       rules of thumb about a finished plan
incumbents.py     prices of rows, and the best plans priced so far
layouts.py        layouts of parameters and main activations
no_plan.py        errors where there is no plan
parts.py          the parts of a plan: candidates, activations, trials, dtypes
plan.py           the plan: a frozen value with JSON
priced.py         a space of plans, priced by branch and bound
questions.py      questions that search again: why not, what if
scaling.py        scaling curves, and plans for a changed machine
search.py         the fastest plan that fits, a ranking, and the source of every plan
space.py          the candidates
workload.py       a problem prepared for pricing
"""
