"""The engines of `shardlib launch`, in the order of its help."""

from __future__ import annotations

from shardlib.launch.kubernetes import Kubernetes
from shardlib.launch.ray import Ray
from shardlib.launch.skypilot import SkyPilot
from shardlib.launch.slurm import Slurm
from shardlib.launch.submission import Engine
from shardlib.launch.tpu_vm import TpuVm

ENGINES: tuple[Engine, ...] = (Slurm(), Kubernetes(), TpuVm(), Ray(), SkyPilot())
