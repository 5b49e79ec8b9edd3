"""What a step costs, before anything is compiled: seconds and bytes of many candidate plans at
once.

Read from top to bottom: `terms` are the words that costs are written in; `step` reads a traced step
as kernels and live ranges; `profiles` rewrite it as other frameworks run it; `machine` has the
rates of chips and links; `items` turn the step into separable terms; `tables` evaluate those for
every shape; `pricing` puts them together; `estimate` is the value that comes out.

"""
