"""How does one CPU become several devices?

JAX decides how many CPU devices there are when it first looks at them, so this must be settled before.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax

from shardlib.errors import TopologyError

_FLAG = "xla_force_host_platform_device_count"


def simulate_cpu_devices(count: int) -> None:
    """Makes JAX see `count` CPU devices and no accelerator.

    Raises:
        TopologyError: JAX has been used already, and sees another number of devices.
    """
    if _FLAG not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", count)
            jax.config.update("jax_platforms", "cpu")
        except RuntimeError:
            pass  # JAX has been used already; what it sees is checked below
    found = jax.devices()
    if len(found) != count or found[0].platform != "cpu":
        raise TopologyError(
            f"{count} CPU devices were asked for, and JAX already runs on {len(found)} of {found[0].platform}\n"
            f"Try: start a fresh process, with JAX_NUM_CPU_DEVICES={count} and JAX_PLATFORMS=cpu in its environment and no --{_FLAG} in XLA_FLAGS")


def keep_compiled(folder: Path) -> None:
    """Has XLA keep what it compiles in a folder, so that a process that starts again need not compile; a folder that is set already stays."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
