"""The engines of `shardlib launch`, in the order of its help."""

from __future__ import annotations

from shardlib.launching.engines.kubernetes.engine import Kubernetes
from shardlib.launching.engines.ray import Ray
from shardlib.launching.engines.shared.engine import Engine
from shardlib.launching.engines.skypilot import SkyPilot
from shardlib.launching.engines.slurm.engine import Slurm
from shardlib.launching.engines.tpu_vm.engine import TpuVm

ENGINES: tuple[Engine, ...] = (Slurm(), Kubernetes(), TpuVm(), Ray(), SkyPilot())
