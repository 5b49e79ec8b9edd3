"""Board power of chips, watts a JAX device, as published by their vendors.

What a board may draw at most, its memory included; hosts, networks and cooling are not in it. Chips
without a published figure are not here: TPU v5e, v5p, v6e and TPU7x.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Chip -> (watts, source).
BOARD_POWER: Mapping[str, tuple[float, str]] = {
    "a100": (400.0, "NVIDIA A100 80GB SXM data sheet: max thermal design power 400 W"),
    "a100-40gb": (400.0, "NVIDIA A100 40GB SXM data sheet: 400 W"),
    "h100": (700.0, "NVIDIA H100 SXM data sheet: up to 700 W"),
    "h200": (700.0, "NVIDIA H200 SXM data sheet: up to 700 W"),
    "b200": (1000.0, "NVIDIA HGX B200: up to 1,000 W a GPU"),
    "gb200": (1200.0, "NVIDIA GB200 NVL72: up to 1,200 W a GPU"),
    "v4": (192.0, "arXiv:2304.01433, table 4: max measured power 192 W a chip"),
}
