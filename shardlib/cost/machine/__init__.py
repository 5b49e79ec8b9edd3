"""What a machine reaches: rooflines and their efficiency, collectives on links, the load of
experts, and learned corrections.
"""
