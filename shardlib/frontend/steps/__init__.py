"""Any step that a user wrote: `compiled` (`compile_step`, with its `pins`) and `parallel`
(`parallelize`).
"""
