"""One candidate becomes a plan: its exact price (`candidate_price`), its layouts, its stages, what
the user should know about it (`findings`, `advice`), and the `Plan` (`assemble`).
"""
