"""What a traced step does: fused kernels, loops over layers, attention, experts, and the live
ranges of its arrays.
"""
