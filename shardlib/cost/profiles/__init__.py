"""What a framework profile changes of a step: rewritten graphs, half and eight-bit products, and
what it keeps for the backward pass.
"""
