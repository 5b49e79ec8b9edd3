"""Start of one program on many hosts, by the schedulers that users have already.

`shardlib.launch.join()` is what a script of your own calls before anything else of JAX.

booking.py     machines for a run, and runs for a machine
commands.py    `shardlib launch | doctor | compare | fit-model`
doctor.py      faults of hosts, found before a run
job.py         a job, and variables that look like secrets
joining.py     `join`: the first thing that every process of a job does, and their roll call
kubernetes.py  the engine of Kubernetes
local.py       many processes on this machine, as one command
ray.py         the engine of Ray
ray_driver.py  the driver of a job on a Ray cluster
skypilot.py    the engine of SkyPilot
slurm.py       the engine of Slurm
submission.py  engines and submissions, and what their scripts have in common
tpu_vm.py      the engine of Cloud TPU VMs
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.launch")  # pyright: ignore
