"""The catalogue: chips and links that shardlib knows, each figure with its source.

gpus.py   GPUs
tpus.py   TPUs
cpus.py   simulated devices
table.py  all of them by the names by which topologies are spelled

Short names of the sources:

- book: jax-ml/scaling-book (`tpus.md`, `sharding.md`, `gpus.md`), "How to Scale Your Model".
- google: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, key specifications.
- libtpu: "exceeds available HBM (...)" of an ahead-of-time compilation with libtpu 0.0.51; the rest
  of the HBM is reserved.
- xla: openxla/xla xla/backends/gpu/target_config/specs/*.txtpb, device_memory_size and
  memory_bandwidth.
- nvidia: data sheets of A100, H100, H200, HGX B200, GB200 NVL72; figures "with sparsity" halved.
- stas: stas00/ml-engineering, compute/accelerator and network chapters.
- nccl: NVIDIA/nccl src/graph/tuning.cc, hwLat (microseconds a step, ring, LL128 protocol).
"""

from shardlib.hardware.catalog.cpus import CPU
from shardlib.hardware.catalog.table import CATALOG

__all__ = ["CATALOG", "CPU"]
