"""The candidates: a prepared problem, its meshes and strategies, and the cost tables of its
components.
"""
