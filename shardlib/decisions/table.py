# ruff: noqa: RUF009  (fields of the table are made by `decision`)
"""The table of decisions: every decision of a plan, with its legal values, default and words.

`Decisions` is the value that the planner makes, that a `Plan` is, and of which pins fix some
fields. A new decision is one more field here: pins, checks, a plan's JSON and digest, `explain`,
`diff` and `docs/pins.md` have it from then on. What prices it or lowers it reads the field.

>>> one = Decisions(zero=3, remat="full")
>>> one.zero, TABLE["zero"].choices[one.zero], TABLE["zero"].default
(3, 'parameters, gradients and optimizer state', 0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardlib.axes import MeshShape
from shardlib.decisions.dtypes import Dtypes, read_dtypes
from shardlib.decisions.entry import Entry, decision, entries
from shardlib.decisions.readers import (
    integer,
    one_of,
    read_axis_order,
    read_group_policies,
    read_mesh,
    read_offload,
    read_rules,
    write_group_policies,
)
from shardlib.exchanges.reading import read_exchange
from shardlib.exchanges.values import EXACT, Exchange
from shardlib.rules import Rules
from shardlib.schedules.table import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """One value for each decision; what each means stands at its field."""

    mesh: MeshShape = decision(
        MeshShape(),
        meaning="all mesh axes; those left out are 1",
        values='`{"data": 2, "fsdp": 8, "tensor": 4}`',
        read=read_mesh,
        write=lambda value, mesh: dict(value),
        also=(("`mesh.AXIS`", "an integer", "one mesh axis; the planner chooses the others"),),
    )
    rules: Rules = decision(
        Rules(),
        meaning="which mesh axes shard which logical axis, a priority list in Flax's or MaxText's"
        " spelling",
        values='`[["mlp", "tensor"], ["batch", ["data", "fsdp"]]]`',
        label="compute layout",
        read=read_rules,
        write=lambda value, mesh: value.to_json(),
    )
    sequence_parallel: bool = decision(
        False,
        meaning="shard the residual stream along the sequence over `tensor`",
        label="residual stream",
        choices={
            False: "replicated over tensor",
            True: "sharded along the sequence over tensor (sequence parallelism)",
        },
    )
    zero: int = decision(
        0,
        meaning="what is sharded over `fsdp` as it is stored: nothing, optimizer state, gradients"
        " too, parameters too; `zero=0` is refused beside an `fsdp` axis that is pinned to more"
        " than 1, where the `data` axis does the same",
        label="stored layout",
        choices={
            0: "nothing more than in compute",
            1: "optimizer state",
            2: "gradients and optimizer state",
            3: "parameters, gradients and optimizer state",
        },
    )
    remat: str = decision(
        "none",
        meaning="what the backward pass rematerialises: nothing beyond what the model asks for, all"
        " but the results of matmuls, everything in a layer",
        label="remat policy",
        choices={
            "none": "none beyond what the model asks for",
            "dots": "dots: the backward pass rematerialises all but the results of matmuls",
            "full": "full: the backward pass rematerialises every layer",
        },
    )
    remat_layers: int = decision(
        0,
        meaning="with `remat`: layers of a stage that are rematerialised, the others are not; 0 for"
        " all",
        values="an integer",
        label="remat policy",
        read=integer(0),
    )
    remat_classes: tuple[tuple[str, str, int], ...] = decision(
        (),
        meaning="for each layer group, by the names that `plan.explain()` shows, a policy and how"
        " many layers of the fullest stage follow it; a word alone means all of them, and groups"
        ' that are left out rematerialise nothing. `"any"` lets the planner choose for every'
        " group, which takes it several times as long; otherwise all groups follow one policy",
        values='`{"dense_layers": "none", "layers": ["full", 20]}`',
        label="remat policy",
        read=read_group_policies,
        write=lambda value, mesh: write_group_policies(value),
        late=True,
    )
    microbatches: int = decision(
        1,
        meaning="gradient accumulation steps; with stages, microbatches of the pipeline. With"
        " `zero` 0 and 1 gradients are reduced once a step, with 2 and 3 in every microbatch, to"
        " shards",
        values="an integer",
        read=integer(1),
    )
    accumulation: int = decision(
        1,
        meaning="groups of microbatches that go through the stages one after the other; gradients"
        " are accumulated as shards between them",
        values="an integer",
        label="microbatches",
        read=integer(1),
        late=True,
    )
    schedule: str = decision(
        "none",
        meaning='pipeline schedule; all but `"none"` need a `stage` axis',
        label="pipeline",
        choices={name: schedule.words(1) or "no stages" for name, schedule in SCHEDULES.items()},
        read=one_of(SCHEDULES),
    )
    virtual_stages: int = decision(
        1,
        meaning='chunks of layers on each stage, with `"interleaved"` or `"gpipe"`',
        values="an integer",
        label="pipeline",
        read=integer(1),
    )
    gather: str = decision(
        "use",
        meaning="when a stage gathers sharded weights: for every operation, or once for all"
        " microbatches of a group",
        label="pipeline",
        choices={
            "use": "weights gathered for every operation",
            "once": "weights gathered once for each group of microbatches",
        },
    )
    pipeline: str = decision(
        "lockstep",
        meaning="how stages run: in one program for all devices, or as per-stage programs that one"
        ' process calls; `"any"` lets the planner decide, otherwise it is `"lockstep"`, which runs'
        " in any number of processes",
        choices={
            "lockstep": "stages are one program",
            "programs": "stages are programs of their own",
        },
        left_open=True,
        late=True,
        searched=False,
    )
    context: str = decision(
        "none",
        meaning="how keys and values meet queries along the `context` axis; the last two are for"
        " models that call `shardlib.attention`, as the reference models do",
        choices={
            "none": "no context axis",
            "all-gather": "keys and values are gathered over context",
            "ring": "keys and values go around the context axis beside the attention",
            "ulysses": "devices of the context axis exchange parts of the sequence for heads",
        },
    )
    attention: str = decision(
        "traced",
        meaning="how the core of attention is computed, in models that call `shardlib.attention`:"
        " as the model is written, in blocks by XLA, by splash attention (TPUs), by the kernel of"
        " cuDNN (NVIDIA GPUs); unpinned, as is fastest, which is the kernel of the vendor where it"
        " applies",
        choices={
            "traced": "as the model is written",
            "blocks": "in blocks, whose scores are not kept",
            "splash": "splash attention, one kernel that writes no scores",
            "cudnn": "the kernel of cuDNN, which writes no scores",
        },
        late=True,
    )
    experts: str = decision(
        "none",
        meaning="tokens sorted as the model is written, or sent to the devices that hold their"
        " experts; which of the two the model says, and it must call"
        " `shardlib.functions.experts.visit`, as the reference models do",
        choices={
            "none": "tokens are sorted as the model is written",
            "dropless": "tokens are routed to the devices that hold their experts",
            "capacity": "tokens are routed to the devices that hold their experts",
        },
    )
    collective_matmul: str = decision(
        "none",
        meaning="how the sequence is gathered for matmuls that tensor shards, and their results are"
        " scattered: by collectives before and after, or shard by shard while others are"
        ' multiplied; `"any"` lets the planner decide, which takes it several times as long,'
        ' otherwise it is `"none"`; see [collective matmul](collective_matmul.md)',
        label="matmuls over tensor",
        choices={
            "none": "collectives before and after them",
            "loop": "their operands and results move piece by piece, while others are multiplied",
        },
        left_open=True,
        late=True,
    )
    offload: tuple[str, ...] = decision(
        (),
        meaning="optimizer state in host memory or on disk, activations in host memory; `[]` for"
        " nothing; disk only where it is pinned",
        label="host memory",
        values='`[]`, `["optimizer"]` or `["disk"]`, `["activations"]`',
        read=read_offload,
        write=lambda value, mesh: list(value),
    )
    axis_order: tuple[str, ...] = decision(
        (),
        meaning="mesh axes from the outermost to the innermost links, each once; those left out"
        " lie inside of them, in the usual order. An axis that a pinned mesh does not have is"
        " refused; where the mesh is left to the planner, the order says how those of them lie that"
        " the mesh has",
        values='`["stage", "data", "tensor"]`',
        label="links",
        read=read_axis_order,
        write=lambda value, mesh: list(value or mesh),
    )
    exchange: Exchange = decision(
        EXACT,
        meaning="how islands meet: parts of the machine that train apart, each with its part of the"
        " batch; anything but `exact` changes the mathematics; see [islands](islands.md)",
        values='`"exact"`, `"diloco:2:100"`, `shardlib.DiLoCo(islands=2, every=100)`,'
        ' `"gossip:8:exponential"`, `"compressed:2:powersgd"`',
        read=read_exchange,
        write=lambda value, mesh: value.to_json(),
        late=True,
        searched=False,
    )
    dtypes: Dtypes = decision(
        (),
        meaning="several of the dtypes below at once",
        values='`{"moment_dtype": "bfloat16"}`',
        read=read_dtypes,
        write=lambda value, mesh: dict(value),
        late=True,
        also=(
            (
                "`param_dtype`, `matmul_dtype`, `gradient_dtype`, `reduction_dtype`,"
                " `moment_dtype`",
                '`"bfloat16"`, `"float8_e4m3fn"`, ..., or objects such as `jnp.bfloat16`',
                "dtype of stored parameters, of the operands of the products of layers' weights,"
                " of gradients kept over microbatches, of gradients in collectives, of optimizer"
                " state",
            ),
        ),
    )

    @property
    def virtual(self) -> int:
        """Chunks of layers on each stage, as pricing calls them."""
        return self.virtual_stages

    @property
    def ring(self) -> bool:
        """Whether keys and values go around the context axis."""
        return self.context == "ring"

    @property
    def fused(self) -> str:
        """How the core of attention is priced: where devices have shards of the sequence to
        themselves, as a kernel that writes no scores.
        """
        return (
            "blocks"
            if self.context in ("ring", "ulysses") and self.attention == "traced"
            else self.attention
        )


#: Every decision by its name.
TABLE: Mapping[str, Entry] = entries(Decisions)
