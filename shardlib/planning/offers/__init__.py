"""What is left to decide once mesh, place and colours are: ZeRO, schedule, remat and offload of
many rows at once, layer groups alike (`price_uniform`) or not (`price_by_layer_group`). Every price
is an `Offer`; the best offers are kept as incumbents, and all of them, where asked for, in a
ranking.
"""
