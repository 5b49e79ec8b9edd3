"""What a traced loss does with its parameters: their uses, custom calls, contractions, and fused
dims.
"""
