"""The catalogue as a table."""

from __future__ import annotations

from collections.abc import Mapping

from shardlib.hardware.catalog.cpus import CPU
from shardlib.hardware.catalog.gpus import GPUS
from shardlib.hardware.catalog.tpus import TPUS
from shardlib.hardware.products import Product

#: Products by the first word of a topology's spelling, in the order in which they are listed.
CATALOG: Mapping[str, Product] = {product.chip.name: product for product in (*TPUS, *GPUS, CPU)}
