"""Kernels by which a called attention can be computed.

>>> OF_VENDOR["google"]
'splash'
"""

from __future__ import annotations

from typing import Literal

#: In blocks, by XLA on any machine; by splash attention, which comes with JAX, on TPUs; by the
#: kernel of cuDNN on NVIDIA GPUs.
Kind = Literal["blocks", "splash", "cudnn"]
KINDS: tuple[Kind, ...] = ("blocks", "splash", "cudnn")
#: The most queries, and the most keys, of a block.
BLOCK = 1024
#: The kernel of a vendor's chips.
OF_VENDOR: dict[str, Kind] = {"google": "splash", "nvidia": "cudnn"}
