"""What `shardlib.why` says of the planner's own programs: bytes that are planned, inherent, avoidable
by a cure, and neither.

    python -m benchmarks why_own [cpu:8 v5e:4x2 h100:8] [--only TEXT] [--cures 1] [--out FILE]

Small models of each kind, planned for a mesh and lowered, in a process of their own each. A row of
the compiled program is counted once: as avoidable where a cure was found for it, else as planned,
else as inherent; what is left is unexplained. Rows of programs that are not run stay as they were
stored.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.environment import command_line, simulate_devices, source_digest, stored, write

simulate_devices(8)

import jax

import shardlib
from benchmarks.compiling import inputs
from shardlib.diagnosis.report import Diagnosis
from shardlib.diagnosis.source import shown
from shardlib.models.config import Experts, TransformerConfig

TOPOLOGIES = ("cpu:8", "v5e:4x2", "h100:8")
_LLAMA = TransformerConfig(
    name="llama", vocab_size=512, layers=4, embed=256, heads=8, kv_heads=4, head_dim=32, mlp=704,
    max_seq=256,
)  # fmt: skip
_GPT2 = replace(
    _LLAMA, name="gpt2", kv_heads=8, mlp=1024, norm="layer", activation="gelu_tanh", gated=False,
    tied=True, learned_positions=True, qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
_MIXTURE = replace(
    _LLAMA, name="mixture", experts=Experts(count=8, per_token=2, mlp=352, balance=0.02)
)
CONFIGS = {config.name: config for config in (_LLAMA, _GPT2, _MIXTURE)}
#: Name of a mesh -> what is pinned.
MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {"mesh": {"fsdp": 8}, "microbatches": 1},
    "fsdp x tensor": {"mesh": {"fsdp": 4, "tensor": 2}, "microbatches": 1},
    "stages": {"mesh": {"stage": 2, "fsdp": 4}, "microbatches": 4},
    "stages x tensor": {"mesh": {"stage": 2, "fsdp": 2, "tensor": 2}, "microbatches": 4},
    "experts": {"mesh": {"fsdp": 2, "expert": 4}, "microbatches": 1},
}
PROGRAMS = {
    f"{config} {mesh}": (config, mesh)
    for config, meshes in {
        "llama": ("fsdp", "fsdp x tensor", "stages", "stages x tensor"),
        "gpt2": ("fsdp x tensor",),
        "mixture": ("fsdp x tensor", "experts"),
    }.items()
    for mesh in meshes
}


def program(name: str, topology: str) -> shardlib.Program:
    """One of `PROGRAMS`, planned for a machine and lowered for simulated devices."""
    config, mesh = PROGRAMS[name]
    given, pin = inputs(CONFIGS[config], 32, 256), MESHES[mesh]
    if topology.startswith("h100"):
        pin = {**pin, "attention": "blocks"}  # cuDNN's kernels do not lower without cuDNN
    return shardlib.compile(**given, topology=topology, pin=pin, devices=jax.devices())


def measured(diagnosis: Diagnosis) -> dict[str, Any]:
    """Bytes of a diagnosis by what is said of them."""
    size = Counter[str]()
    for number, row in enumerate(diagnosis.rows):
        size[_said(diagnosis, number)] += round(row.bytes)
    return {
        "bytes": size.total(),
        **{word: size[word] for word in ("planned", "inherent", "avoidable", "unexplained")},
        "open": [
            f"{row.bytes:.3g} B {row.kind} over {', '.join(row.axes)}: {shown(row.source)}:"
            f" {row.reason}"
            for number, row in enumerate(diagnosis.rows)
            if _said(diagnosis, number) in ("avoidable", "unexplained")
        ][:6],
        "cures": [cure.text for cure in diagnosis.cures],
    }


def _said(diagnosis: Diagnosis, number: int) -> str:
    row = diagnosis.rows[number]
    if number in diagnosis.cured:
        return "avoidable"
    if row.cause == "planned":
        return "planned"
    return "inherent" if row.inherent else "unexplained"


def counted(programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Parts of the bytes of all programs, by machine."""
    sums: dict[str, Counter[str]] = {}
    for rows in programs.values():
        for topology, row in rows.items():
            if "error" not in row:
                words = ("bytes", "planned", "inherent", "avoidable", "unexplained")
                sums.setdefault(topology, Counter()).update({word: row[word] for word in words})
    return {
        topology: {word: round(size / total["bytes"], 4) for word, size in total.items()}
        for topology, total in sums.items()
    }


def main() -> None:
    """Diagnoses the programs, each in a process of its own, and writes a line of each."""
    parser = command_line(__doc__, "why_own_jax-*.json")
    parser.add_argument("topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--cures", type=int, default=0, help="programs compiled to find cures")
    parser.add_argument("--child", action="store_true", help="one program, in this process")
    asked = parser.parse_args()
    if asked.child:
        (topology,) = asked.topologies
        diagnosis = shardlib.why(program(asked.only, topology), cures=asked.cures)
        print(json.dumps(measured(diagnosis)))
        return
    for topology in asked.topologies:
        for name in PROGRAMS:
            if asked.only not in name:
                continue
            start = time.monotonic()
            words = [topology, "--only", name, "--cures", str(asked.cures), "--child"]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks", "why_own", *words],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            row: dict[str, Any] = (
                json.loads(done.stdout.splitlines()[-1])
                if done.returncode == 0
                else {"error": done.stderr.strip().splitlines()[-1][:300]}
            )
            row["seconds"] = round(time.monotonic() - start, 1)
            row["tried"] = asked.cures
            programs = stored(asked.out).get("programs", {})
            programs.setdefault(name, {})[topology] = row
            result = {"source": source_digest("diagnosis", "lowering"), "programs": programs}
            write(asked.out, {"parts": counted(programs), **result}, quiet=True)
            print(f"{name} on {topology}: {row}", flush=True)
