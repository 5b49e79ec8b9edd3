"""How much memory do routed experts take, as predicted and as the compilers of a TPU and a GPU have it?

    python benchmarks/expert_memory.py [--topology v5e:2x4 ...] [--only NAME ...] [--out results.json]

Two small models on eight devices, one with a few wide experts as Mixtral has them, one with many narrow ones and a shared expert as DeepSeek-V3: dropless and with a capacity, under every remat policy. Every step is
compiled ahead of time; bytes are those of one device.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.environment import RESULTS, write
from benchmarks.memory_savers import BATCH, SEQ, TOPOLOGIES, line, measure
from shardlib.models import Experts, TransformerConfig

WIDE = TransformerConfig(name="wide", vocab_size=4096, layers=8, embed=1024, heads=8, kv_heads=2, head_dim=128, mlp=3584, max_seq=SEQ, experts=Experts(count=8, per_token=2, mlp=3584))
NARROW = replace(WIDE, name="narrow", experts=Experts(count=32, per_token=4, mlp=512, shared=1))
MESHES: tuple[dict[str, int], ...] = ({"fsdp": 2, "expert": 4}, {"fsdp": 4, "expert": 2})


def rows() -> list[tuple[str, TransformerConfig, dict[str, Any]]]:
    """(name, model, pins) of every row."""
    found: list[tuple[str, TransformerConfig, dict[str, Any]]] = []
    for model in (WIDE, NARROW):
        assert model.experts is not None
        for form, capacity in (("dropless", 0.0), ("capacity 1.25", 1.25)):
            mesh = MESHES[0] if capacity == 0.0 or model is WIDE else MESHES[1]
            for remat in ("none", "dots", "full"):
                found.append((f"{model.name}, {form}, remat {remat}", replace(model, experts=replace(model.experts, capacity=capacity)), {"mesh": mesh, "zero": 3, "remat": remat, "microbatches": 1}))
    return found


def main() -> None:
    """Measures every row and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--only", nargs="*", default=None, help="names of rows")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert_memory.json")
    args = parser.parse_args()
    print(f"{'':8s} {'GiB per device':44s} {'predicted':>9s} {'compiled':>9s} {'error':>7s}   saved, predicted and compiled")
    made: list[dict[str, Any]] = []
    for topology in args.topology:
        done: dict[str, dict[str, Any]] = {}
        for name, model, pin in rows():
            if args.only is None or name in args.only:
                done[name] = measure(topology, name, pin, model)
                made.append(done[name])
                print(line(done[name], done, name.replace("dots", "none").replace("full", "none") if "remat none" not in name else ""), flush=True)
                write(args.out, {"benchmark": "expert_memory", "batch": BATCH, "seq": SEQ, "rows": made}, quiet=True)


if __name__ == "__main__":
    main()
