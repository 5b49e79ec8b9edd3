"""Eight simulated CPU devices, set before JAX starts; child processes of tests inherit them."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.pop("XLA_FLAGS", None)
