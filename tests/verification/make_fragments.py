"""Writes the stored HLO texts: `python -m tests.verification.make_fragments cpu|tpu|cuda`, where
the compiler of that platform is installed.

The texts are what the compilers of JAX 0.12.0.1 (libtpu 0.0.51) print for `programs.lowered`, with
nothing taken out.
"""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

from shardlib.layout import MeshShape
from shardlib.machines.topology import topology
from shardlib.verification.isolation import compile_devices, environment, target

SPELLING = {"cpu": "cpu:8", "tpu": "v5e:2x4", "cuda": "h100:8"}


def main(platform: str) -> None:
    os.environ.update(environment(platform, 8))
    from tests.verification import programs

    where = target(
        topology(SPELLING[platform]), MeshShape(fsdp=programs.FSDP, tensor=programs.TENSOR)
    )
    compiled = programs.lowered(compile_devices(where)).compile()
    path = Path(__file__).parent / "fragments" / f"{platform}.hlo.gz"
    path.write_bytes(gzip.compress(compiled.as_text().encode(), 9, mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
