"""The process that compiles a function: `python -m shardlib.diagnosis.child FOLDER`.

Reads `job.json` and `program.bin` from the folder and leaves `result.json` and `compiled.hlo`
there; an abort ends this process and no other.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shardlib.untrusted.data import JsonObject
from shardlib.verification.isolation import main, read_job, versions


def run_job(folder: Path) -> JsonObject:
    """Runs the job of a folder; returns what is known beside the texts."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from shardlib._jax_compat import compiled_memory

    job, exported, devices, mesh = read_job(folder)
    replicated = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or replicated)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    lowered = jax.jit(exported.call, donate_argnums=tuple(job["donated"])).lower(*arguments)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=job["options"] or None)
    seconds = time.perf_counter() - start
    (folder / "compiled.hlo").write_text(compiled.as_text() or "", encoding="utf-8")
    return {
        "compile_seconds": seconds,
        "memory": compiled_memory(compiled),
        "device_kind": devices[0].device_kind,
        "versions": versions(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), run_job)
