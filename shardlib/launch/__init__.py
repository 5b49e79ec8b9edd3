"""Start of one program on many hosts, by the schedulers that users have already.

`shardlib.launch.join()` is what a script of your own calls before anything else of JAX.

booking.py     machines for a run, and runs for a machine
clouds.py      the engines of clouds: Cloud TPU VMs, SkyPilot
clusters.py    the engines of clusters: Slurm, Kubernetes, Ray
commands.py    `shardlib launch | doctor | compare | fit-model`
doctor.py      faults of hosts, found before a run
job.py         a job, and variables that look like secrets
joining.py     `join`: the first thing that every process of a job does, and their roll call
local.py       many processes on this machine, as one command
ray_driver.py  the driver of a job on a Ray cluster
submission.py  engines and submissions, and what their scripts have in common
"""

from __future__ import annotations

from shardlib import wings

__all__, __getattr__ = wings.face(__file__, "shardlib.launch")  # pyright: ignore
