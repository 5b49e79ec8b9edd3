"""What a plan decides: pins that fix decisions, a candidate of the search, dtypes, and what a
plan says of its activations, of other plans, and of the compiler.
"""
