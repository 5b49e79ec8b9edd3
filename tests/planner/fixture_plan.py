"""A plan written out by hand, with a bit of everything; its numbers are plausible, and nobody
computed them.
"""

from __future__ import annotations

from shardlib.cost.pricing import DeviceBytes, Estimate, Seconds
from shardlib.findings import Finding
from shardlib.layout import Collective, Layout, MeshShape, Rules
from shardlib.planner.plan import ParameterLayout, Plan, Rejected, Search

GIB = 2**30


def parameter(
    path: str,
    shape: tuple[int, ...],
    colours: tuple[str | None, ...],
    compute: Layout,
    rest: Layout,
) -> ParameterLayout:
    """A bfloat16 parameter whose gradient and optimizer state are cut as it is at rest."""
    return ParameterLayout(
        path=path,
        shape=shape,
        dtype="bfloat16",
        colours=colours,
        compute=compute,
        rest=rest,
        gradient=rest,
        state=rest,
    )


def collective(
    kind: str, axis: str, size: int, count: int, seconds: float, cause: str
) -> Collective:
    return Collective(
        kind=kind, axes=(axis,), bytes=size, count=count, seconds=seconds, cause=cause
    )


def layer(index: int) -> list[ParameterLayout]:
    """Two matrices and a norm."""
    path, whole, stored = f"layers.{index}", Layout((), "tensor"), Layout("fsdp", "tensor")
    back = Layout("tensor", ()), Layout("tensor", "fsdp")
    return [
        parameter(f"{path}.norm.scale", (4096,), ("embed",), Layout(()), Layout("fsdp")),
        parameter(f"{path}.mlp.up.kernel", (4096, 16384), ("embed", "mlp"), whole, stored),
        parameter(f"{path}.mlp.down.kernel", (16384, 4096), ("mlp", "embed"), *back),
    ]


PLAN = Plan(
    model="toy-7b",
    topology="2*h100:8",
    mesh=MeshShape(fsdp=4, tensor=4),
    rules=Rules.parse([("batch", ["data", "fsdp"]), ("mlp", "tensor"), ("vocab", "tensor")]),
    sequence_parallel=True,
    zero=3,
    remat="full",
    microbatches=2,
    parameters=(
        parameter(
            "embed.table",
            (32000, 4096),
            ("vocab", "embed"),
            Layout("tensor", ()),
            Layout("tensor", "fsdp"),
        ),
        *layer(0),
        *layer(1),
        *layer(2),
        parameter("head.bias", (3,), (None,), Layout(()), Layout(())),
    ),
    batch_layouts=(("tokens", Layout("fsdp", ())),),
    estimate=Estimate(
        seconds=Seconds(compute=1.5, exposed=0.25, optimizer=0.0625, overhead=0.0001),
        device_bytes=DeviceBytes(
            parameters=4 * GIB,
            gradients=4 * GIB,
            optimizer=16 * GIB,
            activations=20 * GIB,
            temporaries=3 * GIB,
            communication=GIB,
            batch=65536,
        ),
        collectives=(
            collective("all-gather", "fsdp", 64 * 2**20, 192, 0.375, "layers.*.mlp.up.kernel"),
            collective("reduce-scatter", "fsdp", 16 * 2**20, 96, 0.125, "layers.*.mlp.up.kernel"),
            collective("all-gather", "fsdp", 8192, 192, 0.001, "layers.*.norm.scale"),
            collective("all-gather", "tensor", 32 * 2**20, 128, 0.075, "residual stream"),
        ),
        tokens=131072,
        model_flops=5.5e15,
        hardware_flops=7.2e15,
        peak_flops_per_s=16 * 989e12,
    ),
    search=Search(
        evaluations=412,
        candidates=18000,
        lower_bound=1.8,
        gap=0.0068,
        seconds=0.21,
        rejected=(
            Rejected(
                mesh=MeshShape(data=2, fsdp=8),
                summary="zero 3, remat full",
                reason="slower",
                step_seconds=1.9,
                peak_bytes=60 * GIB,
            ),
            Rejected(
                mesh=MeshShape(tensor=16),
                summary="",
                reason="bound",
                step_seconds=4.0,
                peak_bytes=0,
            ),
            Rejected(
                mesh=MeshShape(data=16),
                summary="",
                reason="memory",
                step_seconds=1.7,
                peak_bytes=121 * GIB,
            ),
        ),
        counts=(("priced", 412), ("bound", 17000), ("memory", 588)),
    ),
    findings=(
        Finding(
            code="opaque-primitive",
            severity="warning",
            message="Nothing is known about the primitive 'fancy'; its operands are gathered.",
            where="loss/fancy",
            hint="replace it, or cut nothing that it reads.",
        ),
    ),
)
