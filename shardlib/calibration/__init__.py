"""Rates of this machine's simulated devices.

`measured_cpu` runs small programs on the local CPU devices, all of them at work at once, and
returns a `Topology` with the measured figures in place of the catalogue's static ones. What devices
share, cores and memory, is shared in the figures: N devices on C cores have together the FLOP/s of
C cores, and a device that works alone has what XLA gives to one (`Topology.alone`).

    programs.py     what is run: kernels, fresh memory, and a block of a model
    exchanges.py    collectives by kind, number of participants and bytes
    stopwatch.py    seconds of a program, on a machine that others use, too
    figures.py      what is measured, by name, and the cache that keeps it
    machine.py      from figures to the topology

It takes a few seconds once; the figures are kept as JSON in the user's cache folder
(`SHARDLIB_CACHE_DIR` if set), one file for each processor, core count, JAX version and number of
devices. Nothing runs, and JAX starts no backend, before the first call.
"""

from shardlib.calibration.figures import cache_path, figure_names
from shardlib.calibration.machine import measured_cpu

__all__ = ["cache_path", "figure_names", "measured_cpu"]
