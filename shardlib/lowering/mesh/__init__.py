"""The device mesh, shardings of every array on it, communication in manual regions, and the dtypes
of a step.
"""
