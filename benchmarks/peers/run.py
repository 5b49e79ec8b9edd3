# ruff: noqa: E402  (paths and simulated devices are set before JAX is imported)
"""One job side by side: this library, plain Flax and google-parallax, and what others make of it.

    python benchmarks/peers/run.py --parallax /path/to/venv/bin/python --out benchmarks/results/peers.json --svg docs/peers.svg

The environment of google-parallax is `pip install google-parallax optax "jax[tpu]"`; without
--parallax it is left out, and the result says so. Every peer runs in a process of its own
(`worker.py`), on the same model, batch and seed (`model.py`), on eight simulated devices of this
machine. Steps take turns, one of each peer a round, so that a busy machine slows all alike; ratios
are medians of the rounds. The same step at the size of a small language model is compiled for
`v5e:2x4` by the TPU compiler, which says memory and cycles; wire bytes are read off both programs.
Configurations of other frameworks are priced, not run: that needs their GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from benchmarks.environment import RESULTS, simulate_devices, write

simulate_devices(8)

from model import JOBS, OPTIMIZER, Decoder, loss, rows

import shardlib
from benchmarks.hlo_collectives import collectives, summary
from shardlib.axes import MeshShape
from shardlib.errors import ShardlibError
from shardlib.models import PRESETS, build, example_batch
from shardlib.verification.hlo.hlo import parse
from shardlib.verification.hlo.traffic import read_traffic

WORKER = Path(__file__).resolve().parent / "worker.py"
TPU = "v5e:2x4"
OURS, THEIRS = ("shardlib", "shardlib-fsdp8"), ("flax-dp", "flax-fsdp")
PARALLAX = ("parallax-fsdp", "parallax-auto")
FRAMEWORKS = ("megatron-core", "torchtitan", "deepspeed", "maxtext", "levanter")
PRICED = "4*h100:8"
#: Peers that are not run, and exactly why.
NOT_RUN = {
    "maxtext": "0.2.5 installs (`maxtext[tpu]`), and trains models of its own configuration, not a"
    " user's module; its plans are priced above",
    "levanter": "marin-levanter installs (with jax<0.12), and trains its own models under its own"
    " Trainer; its plans are priced above",
    "deepspeed": "needs GPUs to run; its plans are priced above",
    "torchtitan": "needs GPUs to run; its plans are priced above",
    "alpa": "0.2.3 needs jax 0.3.22 and a jaxlib of its own that no registry has",
}


class Peer:
    """A worker that has compiled its step."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self.text = folder / f"{name}.txt"
        self.said = folder / f"{name}.log"
        self.process = subprocess.Popen(
            [python, str(WORKER), name, "--text", str(self.text)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said.open("w"),
            text=True,
        )
        try:
            self.facts = ready(self.process.stdout)
        except EOFError as error:
            raise SystemExit(f"{name}: {error}\n{self.said.read_text()[-2000:]}") from error

    def step(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def ready(lines: Any) -> dict[str, Any]:
    """What a worker says when it is."""
    for line in lines:
        if line.startswith("READY "):
            return json.loads(line.removeprefix("READY "))
    raise EOFError("the worker ended before it was ready")


def on_devices(pythons: Mapping[str, str], rounds: int, folder: Path) -> dict[str, Any]:
    """Step times, compile times and traffic of all on simulated devices."""
    peers = {name: Peer(name, python, folder) for name, python in pythons.items()}
    first = peers["flax-fsdp"].facts["losses"]
    for name, peer in peers.items():
        wrong = max(abs(a - b) for a, b in zip(peer.facts["losses"], first, strict=True))
        assert wrong < 1e-4, f"{name} has other losses: {peer.facts['losses']}, not {first}"
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(rounds + 1):
        for name in list(peers) if turn % 2 else list(peers)[::-1]:
            taken = peers[name].step()
            if turn:  # the first round warms up
                seconds[name].append(taken)
    found: dict[str, Any] = {}
    for name, peer in peers.items():
        peer.end()
        pairs = zip(seconds[name], seconds["flax-fsdp"], strict=True)
        found[name] = {
            **peer.facts,
            "step_seconds": statistics.median(seconds[name]),
            "over_flax_fsdp": statistics.median(one / other for one, other in pairs),
            "traffic": summary(collectives(peer.text.read_text())).get("total", {}),
        }
        print(
            f"{name:16s} {found[name]['over_flax_fsdp']:.2f} of the step of flax-fsdp", flush=True
        )
    return found


def for_tpu(pythons: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Memory, cycles and traffic of the step for a TPU, as its compiler has it."""
    found: dict[str, Any] = {}
    for name, python in pythons.items():
        if name in OURS:
            continue
        text = folder / f"{name}-tpu.txt"
        command = [python, str(WORKER), name, "--tpu", TPU, "--text", str(text)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            found[name] = {"error": done.stderr.strip().splitlines()[-1][:300]}
        else:
            facts, program = ready(done.stdout.splitlines()), text.read_text()
            traffic = read_traffic(program, MeshShape(data=parse(program).partitions))
            sent = sum(one.wire_bytes for one in traffic.found)
            found[name] = {**facts, "cycles": traffic.cycles, "wire_bytes": sent}
    job = JOBS["tpu"]
    for name, pin in (("shardlib", {}), ("shardlib-fsdp8", {"mesh": {"fsdp": 8}})):
        try:
            said = shardlib.verify(
                lambda rngs: Decoder(job, rngs), loss, OPTIMIZER, rows(job), topology=TPU, pin=pin
            )
        except ShardlibError as error:
            found[name] = {"error": str(error)}
            continue
        assert said.compiled is not None, said
        found[name] = {
            "compile_seconds": said.compile_seconds,
            "peak_bytes": said.compiled.device_bytes["peak"],
            "temporary_bytes": said.compiled.device_bytes["temporaries"],
            "argument_bytes": said.compiled.device_bytes["arguments"],
            "compute_seconds": said.compiled.compute_seconds,
            "wire_bytes": said.compiled.wire_bytes,
            "plan": str(said.plan.mesh),
            "remat": said.plan.remat,
            "zero": said.plan.zero,
        }
    return found


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


def picture(devices: Mapping[str, Any], tpu: Mapping[str, Any]) -> str:
    """Bars of step time, and of memory and wire bytes for the TPU, each over plain Flax's FSDP."""
    rows = {"step, simulated devices": {n: one["over_flax_fsdp"] for n, one in devices.items()}}
    sent = {n: one["traffic"].get("wire_bytes", 0.0) for n, one in devices.items()}
    rows["wire bytes, simulated devices"] = {n: b / sent["flax-fsdp"] for n, b in sent.items()}
    for title, key in (("memory, v5e", "peak_bytes"), ("wire bytes, v5e", "wire_bytes")):
        if key in tpu.get("flax-fsdp", {}):
            rows[title] = {n: o[key] / tpu["flax-fsdp"][key] for n, o in tpu.items() if key in o}
    colours = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#cc79a7")
    names = list(devices)
    most = max(value for row in rows.values() for value in row.values())
    shapes, y = list[str](), 40
    for title, row in rows.items():
        shapes.append(f'<text x="10" y="{y}" style="font-weight: 600">{title}</text>')
        for name in names:
            y += 20
            value = row.get(name)
            if value is None:
                shapes.append(f'<text x="10" y="{y}">{escape(name)}: not compiled</text>')
                continue
            colour = colours[names.index(name) % len(colours)]
            shapes += [
                f'<text x="10" y="{y}">{escape(name)}</text>',
                f'<rect x="130" y="{y - 11}" height="14" width="{480 * value / most:.1f}" style="fill: {colour}"/>',
                f'<text x="{138 + 480 * value / most:.1f}" y="{y}">{value:.2f}</text>',
            ]
        y += 34
    style = "text { font: 13px system-ui, sans-serif; fill: #1c1c1e } rect.page { fill: #ffffff }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y}" width="700" height="{y}" role="img">'
        f'<title>One job side by side</title><style>{style}</style><rect class="page" width="700" height="{y}"/>'
        '<text x="10" y="18">Over plain Flax with FSDP by hand (1.00); shorter is better</text>'
        + "".join(shapes)
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallax", help="Python of an environment with google-parallax")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--tpu", action="store_true", help="compile for a TPU, too: minutes a peer")
    options = parser.parse_args()
    pythons = dict.fromkeys((*OURS, *THEIRS), sys.executable)
    left_out = dict(NOT_RUN)
    if options.parallax is not None:
        pythons |= dict.fromkeys(PARALLAX, options.parallax)
    else:
        left_out["google-parallax"] = "no environment was named with --parallax"
    with tempfile.TemporaryDirectory() as folder:
        devices = on_devices(pythons, options.rounds, Path(folder))
        tpu = for_tpu(pythons, Path(folder)) if options.tpu else {}
    data = {
        "benchmark": "peers",
        "jobs": {name: vars(job) for name, job in JOBS.items()},
        "rounds": options.rounds,
        "simulated": devices,
        "tpu": {"topology": TPU, "peers": tpu},
        "priced": {"topology": PRICED, "model": "llama2-7b", "frameworks": priced()},
        "not_run": left_out,
    }
    write(options.out, data)
    if options.svg is not None:
        options.svg.write_text(picture(devices, tpu))


if __name__ == "__main__":
    main()
