"""Layers that keep the same tokens of a request: all, or those of a window.

Each of these cache groups has pages of its own, and a table a request that names them.
"""

from shardlib.lowering.serving.cache_groups.constants import Constants
from shardlib.lowering.serving.cache_groups.groups import CacheGroup, Layers, Token, Where

__all__ = ["CacheGroup", "Constants", "Layers", "Token", "Where"]
