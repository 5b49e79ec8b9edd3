"""shardlib: a sharding compiler front end for JAX."""

from __future__ import annotations

__version__ = "0.1.0"
