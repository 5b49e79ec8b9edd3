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


def layer(index: int) -> list[ParameterLayout]:
    """Two matrices and a norm."""
    at = f"layers.{index}"
    return [
        parameter(f"{at}.norm.scale", (4096,), ("embed",), Layout(()), Layout("fsdp")),
        parameter(
            f"{at}.mlp.up.kernel",
            (4096, 16384),
            ("embed", "mlp"),
            Layout((), "tensor"),
            Layout("fsdp", "tensor"),
        ),
        parameter(
            f"{at}.mlp.down.kernel",
            (16384, 4096),
            ("mlp", "embed"),
            Layout("tensor", ()),
            Layout("tensor", "fsdp"),
        ),
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
            Collective(
                kind="all-gather",
                axes=("fsdp",),
                bytes=64 * 2**20,
                count=192,
                seconds=0.375,
                cause="layers.*.mlp.up.kernel",
            ),
            Collective(
                kind="reduce-scatter",
                axes=("fsdp",),
                bytes=16 * 2**20,
                count=96,
                seconds=0.125,
                cause="layers.*.mlp.up.kernel",
            ),
            Collective(
                kind="all-gather",
                axes=("fsdp",),
                bytes=8192,
                count=192,
                seconds=0.001,
                cause="layers.*.norm.scale",
            ),
            Collective(
                kind="all-gather",
                axes=("tensor",),
                bytes=32 * 2**20,
                count=128,
                seconds=0.075,
                cause="residual stream",
            ),
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
