"""From a plan to programs that XLA compiles.

Read from top to bottom: `mesh` and `runtime` are devices and arrays; `reading` knows the parameter
uses and custom calls of a loss; `weights`, `context`, `experts` and `collective_matmul` lower its
operations; `loss` puts the plan's layouts into it; `accumulation`, `pipeline` and `host_memory` are
ways to drive a step; `program` is what a user holds.

"""
