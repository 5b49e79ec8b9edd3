"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Tests compile far more than they compute: without the optimisations of the code generator XLA takes a third of the time.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
