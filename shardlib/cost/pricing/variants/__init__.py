"""Prices of steps that run otherwise: layer groups that follow different remat policies, a part of
the layers rematerialised or offloaded, loops in place of collectives over tensor, compute that is
replicated over an axis.
"""
