"""What both forms of a pipeline share: where a loss is partitioned, the chunk of a stage, gathered
weights, embedding and head.
"""
