"""What runs and what it runs on: training state, compiled executables, checksums of arrays, random
keys, batches.
"""
