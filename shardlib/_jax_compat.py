"""The only file that knows JAX and Flax versions: one function per difference, with the versions beside it.

Supported: JAX 0.10.2 with Flax 0.12.8 (Python 3.11) and JAX 0.12 with Flax 0.12.12 (Python 3.12 and newer).
"""

from __future__ import annotations
