"""What a plan decides: pins that fix decisions, a candidate of the search, dtypes, and the plain
data of a plan with its JSON.
"""
