"""Benchmarks that are run by path: `python benchmarks/NAME.py` is `python -m benchmarks NAME`.

A script that is run by path has its own folder, and not the root, on its path, so that its first
import of the package `benchmarks` finds this module.
"""

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.modules["benchmarks"]
sys.exit(importlib.import_module(f"benchmarks.{Path(sys.argv[0]).stem}").main())
