"""The table of decisions: every decision of a plan, with its legal values, default, description,
and reader.

The planner makes a `Decisions`, a `Plan` extends it, and pins fix some of its fields. A new
decision is one more field here: pins, checks, a plan's JSON and digest, `explain`, `diff` and
`docs/pins.md` follow. Code that prices or lowers the decision reads the field.

>>> one = Decisions(zero=3, remat="full")
>>> one.zero, TABLE["zero"].choices[one.zero], TABLE["zero"].default
(3, 'parameters, gradients and optimizer state', 0)
>>> ordered({"moment_dtype": "bfloat16", "param_dtype": "float32"})
(('param_dtype', 'float32'), ('moment_dtype', 'bfloat16'))

Readers convert what a user or a stored plan says, or raise an error with the legal values.

>>> one_of(("none", "full"))("remat", "full")
'full'
>>> integer(1)("microbatches", 0)
Traceback (most recent call last):
shardlib.errors.PinError: microbatches is 0; it is an integer of at least 1

The `DecisionEntry` of a field defines how the decision is read, checked, written and described:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Few:
...     gather: str = decision(
...         "use",
...         choices={"use": "for every operation", "once": "once per step"},
...         meaning="when weights are gathered",
...     )
>>> entries(Few)["gather"].read("gather", "once")
'once'
>>> Few()
Few(gather='use')

Decisions convert to plain data for JSON; `identity` is the part of it that distinguishes plans.

>>> from shardlib.layout import MeshShape
>>> one = Decisions(mesh=MeshShape(fsdp=8), zero=3)
>>> data = plain_data(one)
>>> data["mesh"], data["axis_order"], data["dtypes"]
({'fsdp': 8}, ['fsdp'], {})
>>> sorted(identity(one).keys() & {"zero", "dtypes"})  # dtypes are those of the traced model
['zero']
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import numpy as np

from shardlib.errors import PinError, ShardlibError
from shardlib.exchanges import EXACT, Exchange, read_exchange
from shardlib.formats import FORMATS
from shardlib.graph import ITEMSIZE
from shardlib.layout import ISLAND, MeshShape, Rules, mesh_axis
from shardlib.schedules import SCHEDULES
from shardlib.untrusted.data import VALUE, Json, JsonMapping, JsonObject, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


#: Dtype decisions: stored parameters; operands of matmuls with layers' weights; gradients
#: accumulated over the microbatches of a step; gradients in collectives; the arrays of optimizer
#: state that have a parameter's shape.
DTYPES: tuple[str, ...] = (
    "param_dtype",
    "matmul_dtype",
    "gradient_dtype",
    "reduction_dtype",
    "moment_dtype",
)
#: (dtype decision, dtype) wherever the dtype is not that of the traced model, in the order of
#: `DTYPES`.
Dtypes = tuple[tuple[str, str], ...]
#: (dtype decision, dtypes) that the planner may choose besides those of the traced model.
Allowed = tuple[tuple[str, tuple[str, ...]], ...]


def read_dtype(key: str, value: object) -> str:
    """A floating-point dtype; an error names the dtypes that can be lowered.

    >>> import numpy as np
    >>> read_dtype("moment_dtype", np.float16), read_dtype("moment_dtype", np.dtype("float32"))
    ('float16', 'float32')

    Args:
        key: name of the decision, for messages.
        value: name of the dtype; or a dtype or scalar type of NumPy or JAX, such as `jnp.bfloat16`.

    Raises:
        PinError: it is not a floating-point dtype.
    """
    name = _name(value)
    decision = key.rpartition(".")[2]
    known = FORMATS if decision == "matmul_dtype" else ITEMSIZE
    if name is None or name not in known or not FORMATS[name].floating:
        legal = lowered_dtypes(decision)
        word = value.lower() if isinstance(value, str) else ""
        meant = [f"; did you mean {dtype!r}?" for dtype in legal if word in FORMATS[dtype].words]
        raise PinError(f"{key} is {shown(value)}; it is one of {', '.join(legal)}{''.join(meant)}")
    return name


def _name(value: object) -> str | None:
    """The name of a dtype given by name or as an object of NumPy or JAX; None for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, np.dtype | type):
        return None
    try:
        return np.dtype(cast("type[Any]", value)).name
    except TypeError:
        return None


def lowered_dtypes(key: str) -> tuple[str, ...]:
    """The dtypes that programs support for `key`, such as "moment_dtype".

    >>> lowered_dtypes("moment_dtype")
    ('float32', 'bfloat16', 'float16')
    """
    return tuple(
        name
        for name, kind in FORMATS.items()
        if (kind.multiplied if key == "matmul_dtype" else kind.stored)
    )


def ordered(dtypes: Mapping[str, str]) -> Dtypes:
    """Dtypes in the order of `DTYPES`."""
    return tuple((key, dtypes[key]) for key in DTYPES if key in dtypes)


def read_dtypes(key: str, value: Json) -> Dtypes:
    """Dtypes from a mapping such as {"moment_dtype": "bfloat16", ...}."""
    return ordered(
        {name: read_dtype(name, dtype) for name, dtype in _by_dtype_decision(key, value).items()}
    )


def read_allowed(key: str, value: Json) -> Allowed:
    """Dtypes that the planner may choose, from a mapping to one or several, such as
    {"moment_dtype": ["bfloat16", ...], ...}.
    """
    listed = {
        name: [dtypes] if _name(dtypes) else dtypes
        for name, dtypes in _by_dtype_decision(key, value).items()
    }
    for name, dtypes in listed.items():
        if not isinstance(dtypes, list | tuple):
            raise PinError(f"{key}.{name} is {dtypes!r}; it is a list of dtypes")
    return tuple(
        (name, tuple(dict.fromkeys(read_dtype(f"{key}.{name}", dtype) for dtype in listed[name])))
        for name in DTYPES
        if name in listed
    )


def _by_dtype_decision(key: str, value: Any) -> Mapping[str, Any]:
    """A mapping with keys from `DTYPES`; raises PinError otherwise."""
    unknown = (
        [name for name in cast("Mapping[str, Any]", value) if name not in DTYPES]
        if isinstance(value, Mapping)
        else None
    )
    if unknown is None:
        raise PinError(f"{key} is {value!r}; it is a mapping from {', '.join(DTYPES)}")
    if unknown:
        raise PinError(
            f"{key} names {', '.join(map(repr, unknown))}; dtypes are those of {', '.join(DTYPES)}"
        )
    return cast("Mapping[str, Any]", value)


#: The value of a decision or pin: a string, a number, a bool, or a value such as `MeshShape`,
#: according to its entry in the table.
PinValue = Any
#: (layer group, remat policy, how many of its layers follow it; None: all).
GroupPolicies = tuple[tuple[str, str, int | None], ...]
#: The planner may choose a policy and a number of layers for each layer group.
ANY_GROUP: GroupPolicies = (("any", "", None),)
#: Arrays that can be in host memory; the planner chooses among these.
HOST_ARRAYS: tuple[str, ...] = ("optimizer", "activations")
#: Arrays that can be off the device: those, or optimizer state on disk.
OFFLOAD: tuple[str, ...] = (*HOST_ARRAYS, "disk")
#: Remat policies of layers.
REMAT: tuple[str, ...] = ("none", "dots", "full")


def one_of(values: Collection[PinValue]) -> Callable[[str, PinValue], PinValue]:
    """A reader of listed values; `values` is consulted at each read, so it may grow."""

    def read(key: str, value: PinValue) -> PinValue:
        legal = tuple(values)
        converted = _plain(value)
        for candidate in legal:
            if type(candidate) is type(converted) and candidate == converted:
                return candidate
        near = _nearest(converted, legal)
        raise PinError(f"{key} is {shown(value)}; it is one of {', '.join(map(repr, legal))}{near}")

    return read


def _plain(value: object) -> object:
    """An integer or bool of NumPy as Python's own; anything else unchanged."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


def _nearest(value: object, legal: Sequence[object]) -> str:
    """The legal value with the nearest spelling, as a question; empty where none is near."""
    spelt = {str(candidate).lower(): candidate for candidate in legal}
    near = difflib.get_close_matches(str(value).lower(), spelt, n=1)
    fits = isinstance(value, str) and len(value) <= VALUE and near
    return f"; did you mean {spelt[near[0]]!r}?" if fits else ""


def integer(minimum: int) -> Callable[[str, PinValue], int]:
    """A reader of integers of at least `minimum`."""

    def read(key: str, value: PinValue) -> int:
        counts = isinstance(value, Integral) and not isinstance(value, bool)
        if not counts or (number := int(value)) < minimum:  # accepts NumPy integers
            raise PinError(f"{key} is {value!r}; it is an integer of at least {minimum}")
        return number

    return read


def read_mesh(key: str, value: Json) -> MeshShape:
    """Sizes of all mesh axes."""
    if isinstance(value, MeshShape):
        return value
    if not isinstance(value, Mapping):
        raise PinError(f"{key} is {value!r}; it is a mapping such as {{'data': 2, 'tensor': 4}}")
    return MeshShape(cast("Mapping[str, int]", value))


def read_rules(key: str, value: Json) -> Rules:
    """Rules in Flax's or MaxText's spelling, see `Rules.parse`."""
    return Rules.parse(value)


def read_group_policies(key: str, value: Json) -> GroupPolicies:
    """Remat policies of layer groups, from a mapping to a policy or (policy, number of layers).

    Args:
        value: {"layers": "full", "dense_layers": ["dots", 4]}, or "any".
    """
    if value == "any":
        return ANY_GROUP
    if not isinstance(value, Mapping):
        raise PinError(
            f"{key} is {value!r}; it is a mapping such as {{'encoder': 'full', 'decoder':"
            " ['dots', 3]}, by the names that plans show"
        )
    read: list[tuple[str, str, int | None]] = []
    for name, entry in cast("Mapping[str, Any]", value).items():
        pair = (
            [entry, None]
            if isinstance(entry, str)
            else list(cast("list[Any]", entry))
            if isinstance(entry, list | tuple)
            else []
        )
        policy, layers = pair if len(pair) == 2 else (None, None)
        if policy not in REMAT or not (
            layers is None or (type(layers) is int and layers >= (policy != "none"))
        ):
            raise PinError(
                f"{key}.{name} is {entry!r}; it is one of {', '.join(map(repr, REMAT))}, or a"
                " list of one of them and how many layers follow it, such as ['full', 3]"
            )
        read.append((str(name), policy, None if policy == "none" else layers))
    return tuple(sorted(read))


def write_group_policies(value: GroupPolicies) -> Json:
    """Remat policies of layer groups as plain data that `read_group_policies` reads.

    >>> write_group_policies((("decoder", "dots", 3), ("encoder", "full", None)))
    {'decoder': ['dots', 3], 'encoder': 'full'}
    """
    if value == ANY_GROUP:
        return "any"
    return {name: policy if layers is None else [policy, layers] for name, policy, layers in value}


def read_offload(key: str, value: Json) -> tuple[str, ...]:
    """Reads the offloaded arrays, in the order of `OFFLOAD`; "none" or [] for nothing."""
    words = cast(
        "list[Any]",
        [value]
        if isinstance(value, str)
        else list(cast("list[Any]", value))
        if isinstance(value, list | tuple)
        else [None],
    )
    if any(part not in (*OFFLOAD, "none") for part in words):
        raise PinError(f"{key} is {value!r}; it is a list of {', '.join(map(repr, OFFLOAD))}")
    if "none" in words and len(set(words)) > 1:
        raise PinError(f"{key} is {value!r}; 'none' is for nothing at all\nTry: [], or no 'none'")
    if {"optimizer", "disk"}.issubset(words):
        raise PinError(
            f"{key} names 'optimizer' and 'disk': optimizer state rests in host memory or on"
            " disk\nTry: one of them"
        )
    return tuple(part for part in OFFLOAD if part in words)


def read_axis_order(key: str, value: Json) -> tuple[str, ...]:
    """Mesh axes, the one on the outermost links first."""
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise PinError(
            f"{key} is {value!r}; it is a list of mesh axes, the one on the outermost links first"
        )
    axes = tuple(mesh_axis(str(name)) for name in cast("list[Any]", value))
    if len(set(axes)) < len(axes):
        raise PinError(f"{key} names an axis twice: {', '.join(axes)}\nTry: each axis once")
    if ISLAND.name in axes[1:]:
        raise PinError(
            f"{key} is {', '.join(axes)}; islands lie on the outermost links\nTry:"
            f" {ISLAND.name!r} first, or not at all"
        )
    return axes


T = TypeVar("T")
#: Reads a user's value, or plain data of a stored plan, given the name of its decision; raises a
#: `ShardlibError` where it is illegal.
Reader = Callable[[str, Any], Any]
#: Writes a value as plain data, for a plan with the given mesh.
Writer = Callable[[Any, MeshShape], Any]
#: The pin value that lets the planner decide what it does not decide by default.
ANY = "any"


def _unchanged(value: Any, mesh: MeshShape) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class DecisionEntry:
    """The definition of a decision.

    Attributes:
        default: value in a plan that does not mention it.
        meaning: description in one line.
        choices: legal values with their descriptions; empty where values are not listed.
        read: reads a value.
        write: writes a value as plain data.
        values: spelling in pins, in Markdown; by default `choices`.
        label: line of `Plan.explain` that shows it; by default its name.
        added_later: True if plans of older versions do not have it; then it is part of a plan's
            identity only where it is not the default.
        searched: True if the planner decides it; otherwise it is as pinned, or the default.
        allows_any: True if pins may leave it open with "any".
        more_rows: further rows of the page of pins: (pin, values, meaning).
    """

    default: Any
    meaning: str
    choices: Mapping[Any, str]
    read: Reader
    write: Writer = _unchanged
    values: str = ""
    label: str = ""
    added_later: bool = False
    searched: bool = True
    allows_any: bool = False
    more_rows: tuple[tuple[str, str, str], ...] = ()


class _EntryOptions(TypedDict, total=False):
    """The other fields of a `DecisionEntry`."""

    write: Writer
    values: str
    label: str
    added_later: bool
    searched: bool
    allows_any: bool
    more_rows: tuple[tuple[str, str, str], ...]


def decision(
    default: T,
    *,
    meaning: str,
    choices: Mapping[PinValue, str] | None = None,
    read: Reader | None = None,
    **others: Unpack[_EntryOptions],
) -> T:
    """A dataclass field with its entry."""
    assert choices or read, "something says which values are legal"
    allows_any = (ANY,) if others.get("allows_any") else ()
    entry = DecisionEntry(
        default=default,
        meaning=meaning,
        choices=choices or {},
        read=read or one_of((*(choices or ()), *allows_any)),
        **others,
    )
    return field(default=default, metadata={"decision": entry})


def entries(kind: type[DataclassInstance]) -> dict[str, DecisionEntry]:
    """The entries of a dataclass by name, in order; fields without one are left out."""
    return {
        field.name: field.metadata["decision"]
        for field in fields(kind)
        if "decision" in field.metadata
    }


# ruff: noqa: RUF009  (fields of the table are made by `decision`)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """One value for each decision; each field has its description."""

    mesh: MeshShape = decision(
        MeshShape(),
        meaning="all mesh axes; those left out are 1",
        values='`{"data": 2, "fsdp": 8, "tensor": 4}`',
        read=read_mesh,
        write=lambda value, mesh: dict(value),
        more_rows=(("`mesh.AXIS`", "an integer", "one mesh axis; the planner chooses the others"),),
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
        meaning="what is sharded over `fsdp` and `context` as it is stored: nothing, optimizer"
        " state, gradients too, parameters too; `zero=0` is refused beside an `fsdp` axis that is"
        " pinned to more than 1, where the `data` axis does the same",
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
        added_later=True,
    )
    microbatches: int = decision(
        1,
        meaning="gradient accumulation steps; with stages, microbatches of the pipeline. With"
        " `zero` 0 and 1 gradients are reduced once per step, with 2 and 3 in every microbatch, to"
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
        added_later=True,
    )
    schedule: str = decision(
        "none",
        meaning='pipeline schedule; all but `"none"` need a `stage` axis',
        label="pipeline",
        choices={name: schedule.label(1) or "no stages" for name, schedule in SCHEDULES.items()},
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
        allows_any=True,
        added_later=True,
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
        added_later=True,
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
        allows_any=True,
        added_later=True,
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
    optimizer_layout: str = decision(
        "owned",
        meaning="how an optimizer that multiplies matrices (Muon, Shampoo) gets them, see"
        " [optimizers](optimizers.md): each matrix on one device, each device all of them, or as"
        " the partitioner shards the products (only where it is pinned); others, such as AdamW,"
        " update shards",
        label="matrices of the optimizer",
        choices={
            "owned": "each matrix is updated by one device",
            "gathered": "every device gathers and updates all matrices",
            "sharded": "the partitioner shards the products",
        },
        added_later=True,
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
        values='`"exact"`, `"diloco:2:100"`, `shardlib.islands.DiLoCo(islands=2, every=100)`,'
        ' `"gossip:8:exponential"`, `"compressed:2:powersgd"`',
        read=read_exchange,
        write=lambda value, mesh: value.to_json(),
        added_later=True,
        searched=False,
    )
    dtypes: Dtypes = decision(
        (),
        meaning="several of the dtypes below at once",
        values='`{"moment_dtype": "bfloat16"}`',
        read=read_dtypes,
        write=lambda value, mesh: dict(value),
        added_later=True,
        more_rows=(
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
    def ring(self) -> bool:
        """True if keys and values are passed around the context axis (ring attention)."""
        return self.context == "ring"

    @property
    def matrix_layout(self) -> str:
        """The layout of the optimizer's matrix updates: as written if its state is on disk."""
        return "sharded" if "disk" in self.offload else self.optimizer_layout

    @property
    def attention_kernel(self) -> str:
        """The attention kernel for pricing: where devices compute with shards of the sequence
        alone, one that writes no scores to memory.
        """
        return (
            "blocks"
            if self.context in ("ring", "ulysses") and self.attention == "traced"
            else self.attention
        )


#: Every decision by its name.
TABLE: Mapping[str, DecisionEntry] = entries(Decisions)


def plain_data(decisions: Decisions) -> JsonObject:
    """All decisions as plain data, as pins spell them."""
    return {
        key: entry.write(getattr(decisions, key), decisions.mesh) for key, entry in TABLE.items()
    }


def identity(decisions: Decisions) -> JsonObject:
    """The decisions that distinguish plans, as plain data.

    Decisions that older versions did not have are left out where they have their default, which is
    what older versions did.
    """
    return {
        key: value
        for key, value in plain_data(decisions).items()
        if not (TABLE[key].added_later and getattr(decisions, key) == TABLE[key].default)
    }


def values_of(decisions: Decisions) -> dict[str, PinValue]:
    """All decisions by name, to construct another value: `Plan(**values_of(one), ...)`."""
    return {key: getattr(decisions, key) for key in TABLE}


def illegal(decisions: JsonMapping) -> list[str]:
    """Lists illegal values among the decisions of a plan (plain data); "any" is legal in pins
    only.
    """
    failures: list[str] = []
    for key, value in decisions.items():
        if key not in TABLE:
            continue
        if value == ANY:
            failures.append(f"{key} is 'any', which is not a decision")
            continue
        try:
            TABLE[key].read(key, value)
        except (ShardlibError, TypeError) as error:
            failures.append(str(error))
    return failures


# --------------------------------------------------------------------------------------------------
# The table of `docs/pins.md`, generated from the table of decisions.
#
#     python -m shardlib.decisions.table docs/pins.md
#
# regenerates it between its two marks; everything else on the page is prose.

#: Marks around the table on the page.
TABLE_BEGIN, TABLE_END = "<!-- table of decisions -->", "<!-- end of the table -->"


def rows(table: Mapping[str, DecisionEntry] = TABLE) -> Iterator[tuple[str, str, str]]:
    """(pin, values, meaning) of every decision, in Markdown."""
    for key, entry in table.items():
        legal = [*entry.choices, *((ANY,) if entry.allows_any else ())]
        spelled = ", ".join(f"`{json.dumps(value)}`" for value in legal)
        yield f"`{key}`", entry.values or spelled, entry.meaning
        yield from entry.more_rows


def table_text(table: Mapping[str, DecisionEntry] = TABLE) -> str:
    """The table in Markdown."""
    head = [("pin", "values", "meaning"), ("---", "---", "---")]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows(table)])


def page(text: str, table: Mapping[str, DecisionEntry] = TABLE) -> str:
    """The page with the table regenerated."""
    before, _, remainder = text.partition(TABLE_BEGIN)
    _, _, after = remainder.partition(TABLE_END)
    return f"{before}{TABLE_BEGIN}\n{table_text(table)}\n{TABLE_END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))
