"""The order of predicted plans, beside their order by the TPU compiler.

    python -m benchmarks order_by_compiler [--job dense --job lstm]

For each job: every mesh over data, fsdp and tensor with ZeRO stages 1 and 3, one or two
microbatches, and with tensor also with sharded sequences, is priced; of the plans within 20% of the
best prediction, the best and others that are spread evenly over the predictions are compiled ahead
of time, with no TPU there. A compiled step takes the compiler's estimate of the cycles of all
kernels, and the time on the links of the collectives that the program has, as far as it is not
hidden:

- `compiled`: by the rule that `refine` ranks plans by (`shardlib.cost.pricing`);
- `scheduled`: by what the compiled schedule runs between start and done (`scheduled_wire.py`).

*Regret*: how much longer the plan that was predicted to be the fastest takes than the fastest of
those that were compiled. *Rank correlation*: Spearman's, where plans differ by more than 2%.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib
from benchmarks.environment import command_line, show, source_digest, stored, write
from benchmarks.families import FAMILIES
from benchmarks.order_candidates import Pin, candidates, judged, pins, summary
from benchmarks.scheduled_wire import waited_seconds
from shardlib.annotation.model import no_mesh
from shardlib.cost.pricing import collective_seconds, reprice
from shardlib.frontend import choice
from shardlib.frontend.lowered import lower
from shardlib.frontend.model import read_and_trace
from shardlib.lowering.program import Program
from shardlib.machines.topology import Topology
from shardlib.verification.hlo import parse
from shardlib.verification.isolation import (
    Compiled,
    ExportedStep,
    Failure,
    Limits,
    Target,
    compile_apart,
    target,
)
from shardlib.verification.report import Key, key_text
from shardlib.verification.traffic import InstructionTraffic, read_traffic
from shardlib.verification.verify import export_step, judge

#: Sequences are sharded over tensor between matmuls.
SEQUENCES = {"batch": ["data", "fsdp"], "seq": ["tensor"]}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model of `FAMILIES` (or the layers of `_mlp`) with a batch on a slice.

    Attributes:
        family: name of the model.
        topology: the slice.
        batch: rows.
        seq: tokens of a row; patches of an image.
    """

    family: str
    topology: str
    batch: int
    seq: int

    def given(self) -> dict[str, Any]:
        """What `shardlib.plan` takes of it."""
        make = _mlp if self.family == "mlp" else FAMILIES[self.family]
        return make(self.batch, self.seq)


def _mlp(batch: int, seq: int) -> dict[str, Any]:
    """Four wide layers on vectors, no sequence."""
    widths = (2048, 8192, 2048, 8192, 1024)

    def init(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Sequential(
            *(
                nnx.Linear(
                    a,
                    b,
                    dtype=jnp.bfloat16,
                    kernel_metadata={"out_sharding": names},
                    use_bias=False,
                    rngs=rngs,
                )
                for a, b, names in zip(
                    widths,
                    widths[1:],
                    (("embed", "mlp"), ("mlp", "embed"), ("embed", "wide"), ("wide", "classes")),
                    strict=False,
                )
            )
        )

    def loss(model: Any, given: Any) -> jax.Array:
        x = given["x"]
        for layer in model.layers[:-1]:
            x = nnx.gelu(layer(x))
        logits = model.layers[-1](x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, given["y"]).mean()

    return {
        "init": init,
        "loss": loss,
        "optimizer": optax.adamw(1e-3),
        "batch": {
            "x": jax.ShapeDtypeStruct((batch, widths[0]), np.float32),
            "y": jax.ShapeDtypeStruct((batch,), np.int32),
        },
        "name": "mlp",
    }


#: Families whose attention is computed as is planned: as XLA computes it in blocks, whose cycles its
#: compiler estimates, and not by a kernel that it does not look into.
WRITTEN = ("dense", "gpt", "gemma", "mixtral")
JOBS: Mapping[str, Job] = {
    name: Job(family=name, topology=topology, batch=batch, seq=seq)
    for name, topology, batch, seq in (
        ("dense", "v5e:2x4", 16, 1024),
        ("gpt", "v5e:2x4", 16, 512),
        ("gemma", "v5e:4x4", 32, 1024),
        ("t5", "v5e:2x2", 16, 512),
        ("mixtral", "v5e:2x4", 16, 1024),
        ("vision", "v5e:2x4", 8, 256),
        ("lstm", "v5e:2x4", 512, 32),
        ("mlp", "v5e:4x4", 16384, 1),
    )
}


def tried(job: Job, devices: int) -> Iterator[Pin]:
    """The pins of a job."""
    fixed = {"attention": "blocks"} if job.family in WRITTEN else {}
    for pin in [{}, *pins(devices)]:
        yield {**pin, **fixed}
        if pin and pin["mesh"]["tensor"] > 1:
            yield {**pin, **fixed, "rules": SEQUENCES}
            if job.family == "mixtral":
                mesh = pin["mesh"]
                experts = {"data": mesh["data"], "fsdp": mesh["fsdp"], "expert": mesh["tensor"]}
                yield {**pin, **fixed, "mesh": experts}


def run(job: Job, most: int, limits: Limits) -> dict[str, Any]:
    """Plans of one job, each compiled."""
    given, machine = job.given(), shardlib.topology(job.topology)
    rows = [
        compiled(given, machine, pin, plan, limits)
        for pin, plan in candidates(given, job.topology, tried(job, machine.devices), most)
    ]
    done = [row for row in rows if "failed" not in row]
    return {
        "job": asdict(job),
        "source": source_digest("lowering", "tracing", "models", "annotation", "cost", "planner"),
        "plans": rows,
        **{name: judged_by(name, done) for name in ("compiled", "scheduled")},
    }


def judged_by(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What the order of the predictions is worth by one reading of the compiled steps."""
    return judged([row["predicted"]["total"] for row in rows], [row[name]["total"] for row in rows])


def compiled(
    given: Mapping[str, Any], machine: Topology, pin: Pin, plan: shardlib.Plan, limits: Limits
) -> dict[str, Any]:
    """A plan with its step as predicted and as compiled, in seconds by part."""
    row: dict[str, Any] = {
        "pin": pin,
        **{name: plan.decisions[name] for name in ("mesh", "zero", "microbatches", "remat")},
        "predicted": _parts(plan.estimate.seconds),
    }
    program, step, where = _exported(given, machine, pin)
    made = compile_apart(step, where, limits)
    if isinstance(made, Failure):
        return {**row, "failed": f"{made.kind}: {made.message.splitlines()[0][:200]}"}
    found = judge(program.plan, machine, where, step, made).compiled
    assert found is not None
    by_rule = reprice(
        plan.estimate.seconds,
        found.collectives,
        found.compute_seconds,
        machine.chip.vendor,
        zero=plan.zero,
    )
    waited = _waited(program.plan, machine, where, step, made)
    return {
        **row,
        "compiled": _parts(by_rule),
        "scheduled": _parts(replace(by_rule, exposed=sum(waited.values()))),
        "wire": {
            "predicted": _wire(plan.estimate.collectives),
            "compiled": _wire(found.collectives),
            "waited": {key_text(key): wait for key, wait in waited.items()},
        },
        "peak_bytes": {
            "predicted": plan.estimate.device_bytes.peak,
            "compiled": found.device_bytes["peak"],
        },
        "versions": made.versions,
        "compile_seconds": made.seconds,
    }


def priced_again(kept: Mapping[str, Any]) -> dict[str, Any]:
    """A job whose programs were compiled before, with today's predictions."""
    job, done = Job(**kept["job"]), [row for row in kept["plans"] if "failed" not in row]
    given, machine = job.given(), shardlib.topology(job.topology)
    for row in done:
        decided = {name: row[name] for name in ("mesh", "zero", "microbatches", "remat")}
        plan = shardlib.plan(**given, topology=machine, pin={**row["pin"], **decided})
        compiled = [
            shardlib.Collective(kind=kind, axes=tuple(axes.split("·")), bytes=0, seconds=seconds)
            for key, seconds in row["wire"]["compiled"].items()
            for kind, axes in [key.split(" over ")]
            if axes != "unknown axes"
        ]
        rule = reprice(
            plan.estimate.seconds,
            compiled,
            row["compiled"]["compute"],
            machine.chip.vendor,
            zero=plan.zero,
        )
        waited = row["scheduled"]["exposed"]
        row["predicted"] = _parts(plan.estimate.seconds)
        row["compiled"] = _parts(rule)
        row["scheduled"] = _parts(replace(rule, exposed=waited))
    figures = {name: judged_by(name, done) for name in ("compiled", "scheduled")}
    return {**kept, **figures, "priced": source_digest("cost", "planner")}


def _exported(
    given: Mapping[str, Any], machine: Topology, pin: Pin
) -> tuple[Program, ExportedStep, Target]:
    """The program of a plan, and its step for a compiler."""
    with no_mesh():
        traced = read_and_trace(**{"batch_axes": None, **given})
        traced, plan = choice.searched(traced, machine, pin)
        program = lower(traced, plan, abstract=True)
        where = target(machine, plan.mesh, plan.axis_order)
        return program, export_step(program, where.platform), where


def _waited(
    plan: shardlib.Plan, machine: Topology, where: Target, step: ExportedStep, made: Compiled
) -> dict[Key, float]:
    """Seconds that the compiled schedule waits for collectives, by kind and mesh axes."""
    module = parse(made.text)
    traffic = read_traffic(module, plan.mesh, step.arguments, where.positions)

    def seconds(one: InstructionTraffic) -> float:
        return collective_seconds(
            one.kind, one.axes, one.members, one.bytes, plan.mesh, machine, plan.axis_order
        )

    return waited_seconds(module, traffic.found, seconds, where.cycles_per_s)


def _parts(seconds: shardlib.Seconds) -> dict[str, float]:
    return {**asdict(seconds), "total": seconds.total}


def _wire(collectives: Iterable[shardlib.Collective]) -> dict[str, float]:
    """Seconds of all executions, hidden or not, by kind and mesh axes."""
    seconds: dict[str, float] = {}
    for one in collectives:
        key = key_text((one.kind, one.axes))
        seconds[key] = seconds.get(key, 0.0) + one.seconds
    return seconds


def main() -> None:
    parser = command_line(__doc__, "order_by_compiler.json")
    parser.add_argument("--job", choices=JOBS, action="append", help="all of them when left out")
    parser.add_argument("--plans", type=int, default=6, help="plans of a job, at most")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each compilation")
    parser.add_argument(
        "--price-again",
        action="store_true",
        help="compile nothing: predict the stored plans again, and judge the order anew",
    )
    args = parser.parse_args()
    limits = Limits(seconds=args.seconds, memory_bytes=24 * 2**30)
    kept = stored(args.out, "jobs")
    for name in args.job or JOBS:
        again = args.price_again and name in kept
        kept[name] = priced_again(kept[name]) if again else run(JOBS[name], args.plans, limits)
        show(name, kept[name], "compiled", "scheduled")
        figures = {
            by: summary(job[by] for job in kept.values()) for by in ("compiled", "scheduled")
        }
        result = {"benchmark": "order_by_compiler", **figures, "jobs": kept}
        write(args.out, result, quiet=True)
        print(figures, flush=True)
