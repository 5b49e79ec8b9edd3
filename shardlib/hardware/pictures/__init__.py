"""Machines as small pictures.

links.py   the tiers of links of a machine, and what each connects
"""
