"""One job side by side: this library, plain Flax, google-parallax, MaxText and Levanter.

    python benchmarks/peers/run.py --parallax PYTHON --maxtext PYTHON --levanter PYTHON --tpu

Each PYTHON is that of an environment with the peer; `docs/peers.md` has their pip lines. A peer
that is not named is left out, and the result says so. Every peer runs in a process of its own
(`worker.py`), on the same batch, on eight simulated devices of this machine: this library, Flax and
google-parallax with the model of `model.py`, the others with models of their own of the same sizes.
Losses must be equal. Steps take turns, one of each peer a round, so that a busy machine slows all
alike; ratios are medians of the rounds. With --tpu the same step at the size of a small language
model is compiled for `v5e:2x4` by the TPU compiler, which says memory and cycles; wire bytes are
read off both programs here, by one reader. Configurations of other frameworks are priced, not run:
that needs their GPUs. One run writes the result, the picture and the tables of the page.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from benchmarks.environment import Answering, command_line, simulate_devices, write

simulate_devices(8)

from model import JOBS, OPTIMIZER
from page import tables
from picture import picture
from products import product_flops

import shardlib
from benchmarks.hlo_collectives import collectives, summary
from shardlib.errors import ShardlibError
from shardlib.layout import MeshShape
from shardlib.models import build, example_batch
from shardlib.models.presets import PRESETS
from shardlib.verification.hlo import parse
from shardlib.verification.traffic import read_traffic

WORKER = Path(__file__).resolve().parent / "worker.py"
TPU = "v5e:2x4"
HERE = ("shardlib", "shardlib-fsdp8", "flax-dp", "flax-fsdp")
#: Peers of environments of their own.
THERE = {
    "parallax": ("parallax-fsdp", "parallax-auto"),
    "maxtext": ("maxtext",),
    "levanter": ("levanter",),
}
FRAMEWORKS = ("megatron-core", "torchtitan", "deepspeed", "maxtext", "levanter")
PRICED = "4*h100:8"
#: Peers that are not run, and exactly why.
NOT_RUN = {
    "deepspeed": "needs GPUs to run; its plans are priced above",
    "torchtitan": "needs GPUs to run; its plans are priced above",
    "alpa": "0.2.3 needs jax 0.3.22 and a jaxlib of its own that no registry has",
}


class Peer(Answering):
    """A worker that has compiled its step."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.text, said = folder / f"{name}.txt", folder / f"{name}.log"
        command = [python, str(WORKER), name, "--text", str(self.text)]
        super().__init__(command, stderr=said.open("w"))
        try:
            self.facts = ready(self.lines)
        except EOFError as error:
            raise SystemExit(f"{name}: {error}\n{said.read_text()[-2000:]}") from error


def ready(lines: Iterable[str]) -> dict[str, Any]:
    """What a worker says when it is."""
    for line in lines:
        if line.startswith("READY "):
            return json.loads(line.removeprefix("READY "))
    raise EOFError("the worker ended before it was ready")


def on_devices(pythons: Mapping[str, str], rounds: int, folder: Path) -> dict[str, Any]:
    """Step times, compile times and traffic of all on simulated devices."""
    peers = dict[str, Peer]()
    for name, python in pythons.items():
        peers[name] = Peer(name, python, folder)
        print(f"{name:18s} compiled", flush=True)
    first = peers["flax-fsdp"].facts["losses"]
    for name, peer in peers.items():
        wanted = peer.facts.get("reference", first)
        wrong = max(abs(a - b) for a, b in zip(peer.facts["losses"], wanted, strict=True))
        assert wrong < 1e-4, f"{name} has other losses: {peer.facts['losses']}, not {wanted}"
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(rounds + 1):
        for name in list(peers) if turn % 2 else list(peers)[::-1]:
            taken = float(peers[name].ask())
            if turn:  # the first round warms up
                seconds[name].append(taken)
    found: dict[str, Any] = {}
    for name, peer in peers.items():
        peer.close()
        pairs = zip(seconds[name], seconds["flax-fsdp"], strict=True)
        found[name] = {
            **peer.facts,
            "step_seconds": statistics.median(seconds[name]),
            "over_flax_fsdp": statistics.median(one / other for one, other in pairs),
            "product_flops": product_flops(text := peer.text.read_text()),
            "traffic": summary(collectives(text)).get("total", {}),
        }
        print(
            f"{name:18s} {found[name]['over_flax_fsdp']:.2f} of the step of flax-fsdp", flush=True
        )
    return found


def for_tpu(pythons: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Memory, cycles and traffic of the step for a TPU, as its compiler has it."""
    found: dict[str, Any] = {}
    for name, python in pythons.items():
        text = folder / f"{name}-tpu.txt"
        command = [python, str(WORKER), name, "--tpu", TPU, "--text", str(text)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            found[name] = {"error": done.stderr.strip().splitlines()[-1][:300]}
        else:
            found[name] = ready(done.stdout.splitlines()) | read(text.read_text())
        print(f"{name:18s} {found[name].get('error', 'compiled for a TPU')}", flush=True)
    return found


def read(program: str) -> dict[str, Any]:
    """Cycles and wire bytes of a program for a TPU; nothing of no text."""
    if not program:
        return {}
    traffic = read_traffic(program, MeshShape(data=parse(program).partitions))
    sent = sum(one.wire_bytes for one in traffic.found)
    return {"cycles": traffic.cycles, "wire_bytes": sent, "unread": list(traffic.problems)}


def priced() -> dict[str, Any]:
    """The best plan of each framework within what it can do, for Llama 2 7B on 32 H100."""
    config = PRESETS["llama2-7b"]
    init, objective = build(config)
    batch = example_batch(config, 256, 4096)
    found: dict[str, Any] = {}
    for name in (None, *FRAMEWORKS):
        try:
            plan = shardlib.plan(
                init, objective, OPTIMIZER, batch, topology=PRICED, framework=name, name="llama2-7b"
            )
        except ShardlibError as error:
            found[name or "shardlib"] = {"error": str(error).splitlines()[0]}
            continue
        found[name or "shardlib"] = {
            "step_seconds": plan.estimate.step_seconds,
            "mfu": plan.estimate.mfu,
            "mesh": str(plan.mesh),
            "peak_bytes": plan.estimate.device_bytes.peak,
        }
    return found


def main() -> None:
    parser = command_line(__doc__, "peers.json")
    for name in THERE:
        parser.add_argument(f"--{name}", help=f"Python of an environment with {name}")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--svg", type=Path, help="where a picture of it goes")
    parser.add_argument("--page", type=Path, help="a page whose tables are written anew")
    parser.add_argument(
        "--defaults", action="store_true", help="MaxText and Levanter also as they come"
    )
    parser.add_argument("--programs", type=Path, help="where the texts of all programs stay")
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU, too: minutes a peer")
    options = parser.parse_args()
    started = time.perf_counter()
    pythons: dict[str, str] = dict.fromkeys(HERE, sys.executable)
    left_out = dict(NOT_RUN)
    for name, peers in THERE.items():
        if (python := getattr(options, name)) is None:
            left_out[name] = f"no environment was named with --{name}"
        else:
            pythons |= {peer: str(python) for peer in peers}
            if options.defaults and name in ("maxtext", "levanter"):
                pythons[f"{name}-defaults"] = str(python)
    with tempfile.TemporaryDirectory() as made:
        folder = options.programs or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        devices = on_devices(pythons, options.rounds, folder)
        tpu = for_tpu(pythons, folder) if options.tpu else {}
    data = {
        "benchmark": "peers",
        "jobs": {name: vars(job) for name, job in JOBS.items()},
        "rounds": options.rounds,
        "simulated": devices,
        "tpu": {"topology": TPU, "peers": tpu},
        "priced": {"topology": PRICED, "model": "llama2-7b", "frameworks": priced()},
        "not_run": left_out,
        "seconds": round(time.perf_counter() - started),
    }
    write(options.out, data)
    if options.svg is not None:
        options.svg.write_text(picture(devices, tpu))
    if options.page is not None:
        options.page.write_text(tables(options.page.read_text(), data))


if __name__ == "__main__":
    main()
