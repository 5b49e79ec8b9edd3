"""Which decisions did the user make, and do they make sense?

Pins use the words of a plan's JSON. A pinned `mesh` fixes every axis (those left out are 1); a
dotted `mesh.tensor` fixes that one axis and leaves the others to the planner.

>>> pins = Pins.parse({"mesh.tensor": 8, "remat": "full"})
>>> pins.axes, pins.mesh is None, pins.remat
((('tensor', 8),), True, 'full')
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from shardlib.axes import MESH_AXES, MESH_AXIS_ALIASES, STORED_AXES, MeshShape, mesh_axis
from shardlib.errors import PinError, ShardlibError, raise_all
from shardlib.graph.kernels import KINDS
from shardlib.planning.decisions.dtypes import DTYPES, Dtypes, ordered, read_dtype
from shardlib.propagation.colours import Colouring
from shardlib.rules import Rules
from shardlib.schedules.schedule import Schedule
from shardlib.schedules.table import SCHEDULES, named, pipelines

#: Words that can be pinned.
WORDS: tuple[str, ...] = (
    "mesh",
    "rules",
    "sequence_parallel",
    "zero",
    "remat",
    "remat_layers",
    "remat_classes",
    "microbatches",
    "accumulation",
    "schedule",
    "virtual_stages",
    "gather",
    "pipeline",
    "context",
    "attention",
    "experts",
    "collective_matmul",
    "offload",
    "axis_order",
    "dtypes",
    *DTYPES,
    "allow",
)
#: How keys and values meet queries of other parts of the sequence: not at all, gathered, or passed
#: around a ring.
CONTEXT: tuple[str, ...] = ("none", "all-gather", "ring", "ulysses")
#: How the core of attention is computed.
ATTENTION: tuple[str, ...] = ("traced", *KINDS)
#: When a stage gathers weights that rest in pieces; "any" leaves that to the planner where nothing
#: else pinned asks for stages.
GATHER: tuple[str, ...] = ("use", "once", "any")
#: How the stages of a pipeline run: in one program for all devices, or as programs of their own
#: that one process calls.
PIPELINE: tuple[str, ...] = ("lockstep", "programs")
#: What becomes of the tokens of experts: sorted as the model is written, or sent between devices,
#: all of them or as many as experts take; which of the two the model says.
EXPERTS: tuple[str, ...] = ("none", "dropless", "capacity")
#: How the sequence is gathered for matmuls over tensor, and their results are scattered: by
#: collectives before and after them, or piece by piece in a loop; "any" leaves it to the planner.
COLLECTIVE_MATMUL: tuple[str, ...] = ("none", "loop", "any")
#: What can rest in host memory; the planner chooses among these.
HOSTED: tuple[str, ...] = ("optimizer", "activations")
#: What can rest elsewhere than on the device: that, or optimizer state on disk.
OFFLOAD: tuple[str, ...] = (*HOSTED, "disk")
REMAT: tuple[str, ...] = ("none", "dots", "full")
#: Every class of layers may have a policy and a number of layers of its own.
ANY: tuple[tuple[str, str, int | None], ...] = (("any", "", None),)


@dataclass(frozen=True, kw_only=True)
class Pins:
    """Decisions fixed by hand; None (or empty) leaves a decision to the planner.

    Attributes:
        mesh: all axes.
        axes: some axes, (name, size).
        rules: colour -> mesh axes, in Flax's or MaxText's spelling.
        sequence_parallel, zero, remat, remat_layers, remat_classes, microbatches, accumulation,
        schedule, virtual_stages, gather, pipeline, context, attention, experts, collective_matmul,
        offload, axis_order: see `Plan`.
        dtypes: (what, dtype), see `shardlib.planning.decisions.dtypes`.
        allow: (what, dtypes) that the planner may choose beside those of the traced model.
    """

    mesh: MeshShape | None = None
    axes: tuple[tuple[str, int], ...] = ()
    rules: Rules | None = None
    sequence_parallel: bool | None = None
    zero: int | None = None
    remat: str | None = None
    remat_layers: int | None = None
    remat_classes: tuple[tuple[str, str, int | None], ...] = ()
    microbatches: int | None = None
    accumulation: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    gather: str | None = None
    pipeline: str | None = None
    context: str | None = None
    attention: str | None = None
    experts: str | None = None
    collective_matmul: str | None = None
    offload: tuple[str, ...] | None = None
    axis_order: tuple[str, ...] | None = None
    dtypes: Dtypes = ()
    allow: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, pin: Mapping[str, Any] | Pins | None) -> Pins:
        """Reads pins.

        Raises:
            PinError: a word or a value is unknown, or two pins contradict each other; all of them
                are listed.
        """
        if isinstance(pin, Pins):
            return pin
        failures: list[str] = []
        read: dict[str, Any] = {}
        axes: dict[str, int] = {}
        dtypes: dict[str, str] = {}
        for word, value in (pin or {}).items():
            try:
                if word.startswith("mesh."):
                    axis = mesh_axis(word.removeprefix("mesh."))
                    axes[axis] = MeshShape({axis: value})[axis]
                elif word in DTYPES:
                    dtypes[word] = read_dtype(word, value)
                elif word in _READERS:
                    read[word] = _READERS[word](value)
                else:
                    failures.append(_unknown(word))
            except ShardlibError as error:
                failures.append(str(error))
        failures += _contradictions(read, axes)
        failures += [
            f"{word}={dtypes[word]!r} contradicts dtypes={{{word!r}: {dtype!r}}}"
            for word, dtype in read.get("dtypes", ())
            if dtypes.get(word, dtype) != dtype
        ]
        if failures:
            raise_all(PinError, "pins are not usable", failures)
        if "mesh" in read:
            axes = {}
        read["dtypes"] = ordered({**dict(read.get("dtypes", ())), **dtypes})
        return cls(
            axes=tuple(sorted(axes.items())),
            **{word: value for word, value in read.items() if word in cls.__dataclass_fields__},
        )

    def changed(self, other: Pins) -> Pins:
        """These pins with those that the others set; a mesh or an axis of the others takes the
        place of all axes.
        """
        given = {
            name: value
            for name in self.__dataclass_fields__
            if (value := getattr(other, name)) not in (None, ())
        }
        freed = {"mesh": None, "axes": ()} if given.keys() & {"mesh", "axes"} else {}
        return replace(self, **{**freed, **given})

    @property
    def unstaged(self) -> bool:
        """Whether a schedule is pinned that has no stages."""
        return self.schedule is not None and not named(self.schedule).staged

    @property
    def staged(self) -> bool:
        """Whether all plans under the pins have stages."""
        sizes = dict(self.mesh or self.axes)
        return (
            sizes.get("stage", 1) > 1
            or (self.schedule is not None and named(self.schedule).staged)
            or (self.accumulation or 1) > 1
            or self.pipeline == "programs"
        )

    def without(self) -> dict[str, Pins]:
        """For every pin, the other pins alone; used to find which pin to relax."""
        given = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if getattr(self, name) not in (None, ())
        }
        return {name: Pins(**{k: v for k, v in given.items() if k != name}) for name in given}

    def __str__(self) -> str:
        parts = [
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if getattr(self, name) not in (None, ())
        ]
        return ", ".join(parts) or "nothing"


def _unknown(word: str) -> str:
    near = difflib.get_close_matches(word, [*WORDS, *(f"mesh.{axis}" for axis in MESH_AXES)], n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{word!r} is no decision{meant} (decisions are {', '.join(WORDS)} and mesh.AXIS)"


def _read_mesh(value: Any) -> MeshShape:
    if isinstance(value, MeshShape):
        return value
    if not isinstance(value, Mapping):
        raise PinError(f"mesh is {value!r}; it is a mapping such as {{'data': 2, 'tensor': 4}}")
    return MeshShape(cast("Mapping[str, int]", value))


def _read_choice(word: str, values: Collection[Any]) -> Any:
    def read(value: Any) -> Any:
        words = tuple(values)
        if value not in words or isinstance(value, bool) != isinstance(words[0], bool):
            raise PinError(f"{word} is {value!r}; it is one of {', '.join(map(repr, words))}")
        return value

    return read


def _read_count(word: str, least: int = 1) -> Any:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PinError(f"{word} is {value!r}; it is an integer of at least {least}")
        return value

    return read


def _read_classes(value: Any) -> tuple[tuple[str, str, int | None], ...]:
    """Reads (class of layers, policy, how many of its layers follow it; None: all)."""
    if value == "any":
        return ANY
    if not isinstance(value, Mapping):
        raise PinError(
            f"remat_classes is {value!r}; it is a mapping such as {{'encoder': 'full', 'decoder':"
            " ['dots', 3]}, by the names that plans show"
        )
    found: list[tuple[str, str, int | None]] = []
    for name, one in cast("Mapping[str, Any]", value).items():
        pair = (
            [one, None]
            if isinstance(one, str)
            else list(cast("list[Any]", one))
            if isinstance(one, list | tuple)
            else []
        )
        policy, layers = pair if len(pair) == 2 else (None, None)
        if policy not in REMAT or not (
            layers is None or (type(layers) is int and layers >= (policy != "none"))
        ):
            raise PinError(
                f"remat_classes.{name} is {one!r}; it is one of {', '.join(map(repr, REMAT))}, or a"
                " list of that and the number of layers that follow it"
            )
        found.append((str(name), policy, None if policy == "none" else layers))
    return tuple(sorted(found))


def _read_dtypes(value: Any) -> Dtypes:
    return ordered(
        {word: read_dtype(word, dtype) for word, dtype in _dtype_words("dtypes", value).items()}
    )


def _read_allow(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = _dtype_words("allow", value)
    listed = {
        word: [dtypes] if isinstance(dtypes, str) else dtypes for word, dtypes in found.items()
    }
    for word, dtypes in listed.items():
        if not isinstance(dtypes, list | tuple):
            raise PinError(f"allow.{word} is {dtypes!r}; it is a list of dtypes")
    return tuple(
        (word, tuple(dict.fromkeys(read_dtype(f"allow.{word}", dtype) for dtype in listed[word])))
        for word in DTYPES
        if word in listed
    )


def _dtype_words(word: str, value: Any) -> Mapping[str, Any]:
    """A mapping from what has a dtype."""
    unknown = (
        [name for name in cast("Mapping[str, Any]", value) if name not in DTYPES]
        if isinstance(value, Mapping)
        else None
    )
    if unknown is None:
        raise PinError(f"{word} is {value!r}; it is a mapping from {', '.join(DTYPES)}")
    if unknown:
        raise PinError(
            f"{word} names {', '.join(map(repr, unknown))}; dtypes are those of {', '.join(DTYPES)}"
        )
    return cast("Mapping[str, Any]", value)


def _read_offload(value: Any) -> tuple[str, ...]:
    words = cast(
        "list[Any]",
        (
            [value]
            if isinstance(value, str)
            else list(cast("list[Any]", value))
            if isinstance(value, list | tuple)
            else [None]
        ),
    )
    if any(word not in (*OFFLOAD, "none") for word in words):
        raise PinError(f"offload is {value!r}; it is a list of {', '.join(map(repr, OFFLOAD))}")
    if {"optimizer", "disk"}.issubset(words):
        raise PinError(
            "offload names 'optimizer' and 'disk': optimizer state rests in host memory or on"
            " disk\nTry: one of them"
        )
    return tuple(word for word in OFFLOAD if word in words)


def _read_order(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise PinError(
            f"axis_order is {value!r}; it is a list of mesh axes, the one on the outermost links"
            " first"
        )
    axes = tuple(mesh_axis(str(name)) for name in cast("list[Any]", value))
    if len(set(axes)) < len(axes):
        raise PinError(f"axis_order names an axis twice: {', '.join(axes)}")
    return axes


_READERS: Mapping[str, Any] = {
    "mesh": _read_mesh,
    "rules": Rules.parse,
    "sequence_parallel": _read_choice("sequence_parallel", (False, True)),
    "zero": _read_choice("zero", (0, 1, 2, 3)),
    "remat": _read_choice("remat", REMAT),
    "remat_layers": _read_count("remat_layers", 0),
    "remat_classes": _read_classes,
    "microbatches": _read_count("microbatches"),
    "accumulation": _read_count("accumulation"),
    "schedule": _read_choice("schedule", SCHEDULES),
    "virtual_stages": _read_count("virtual_stages"),
    "gather": _read_choice("gather", GATHER),
    "pipeline": _read_choice("pipeline", PIPELINE),
    "context": _read_choice("context", CONTEXT),
    "attention": _read_choice("attention", ATTENTION),
    "experts": _read_choice("experts", EXPERTS),
    "collective_matmul": _read_choice("collective_matmul", COLLECTIVE_MATMUL),
    "offload": _read_offload,
    "axis_order": _read_order,
    "dtypes": _read_dtypes,
    "allow": _read_allow,
}


def legal(decisions: Mapping[str, Any]) -> list[str]:
    """Which decisions of a plan have values that none can have; "any" is a word of pins alone."""
    found: list[str] = []
    for word, value in decisions.items():
        if word not in _READERS:
            continue
        if value == "any":
            found.append(f"{word} is 'any', which is no decision")
            continue
        try:
            _READERS[word](value)
        except (ShardlibError, TypeError) as error:
            found.append(str(error))
    return found


def _tried_whole(schedule: Schedule) -> bool:
    return 1 in schedule.tried(pinned=True, chunks=None, policy="none", most=2)


def _with_chunks() -> str:
    """The schedules whose stages may have several chunks of layers; first those that are tried with
    chunks alone.
    """
    names = [
        schedule.name
        for schedule in sorted(pipelines(), key=_tried_whole)
        if schedule.allows(2, lockstep=True)
    ]
    return " or ".join(map(repr, names))


def _contradictions(read: Mapping[str, Any], axes: Mapping[str, int]) -> list[str]:
    mesh: MeshShape | None = read.get("mesh")
    found = [
        f"mesh.{axis}={size} contradicts mesh={dict(mesh)}"
        for axis, size in axes.items()
        if mesh is not None and mesh[axis] != size
    ]
    sizes = dict(axes) if mesh is None else {axis: mesh[axis] for axis in MESH_AXES}
    groups: int = read.get("accumulation", 1)
    schedule = named(read["schedule"]) if "schedule" in read else None
    staged, unstaged = (
        schedule is not None and schedule.staged,
        schedule is not None and not schedule.staged,
    )
    classes = read.get("remat_classes", ()) if read.get("remat_classes") != ANY else ()
    policies, numbers = (
        [policy for _, policy, _ in classes],
        [layers for _, policy, layers in classes if policy != "none"],
    )
    found += [
        fault
        for unless, fault in (
            (
                not staged or sizes.get("stage", 2) > 1,
                (
                    f"schedule={read.get('schedule')!r} needs stages, and the stage axis is pinned"
                    " to 1"
                ),
            ),
            (
                not unstaged or sizes.get("stage", 1) == 1,
                (
                    "schedule='none' runs without stages, and the stage axis is pinned to"
                    f" {sizes.get('stage')}"
                ),
            ),
            (
                schedule is None or schedule.allows(read.get("virtual_stages", 1), lockstep=True),
                (
                    f"virtual_stages={read.get('virtual_stages')} needs the schedule"
                    f" {_with_chunks()}, and it is pinned to {read.get('schedule')!r}"
                ),
            ),
            (
                read.get("gather") != "once"
                or (read.get("zero", 3) == 3 and sizes.get("stage", 2) > 1),
                (
                    "gather='once' is for weights in pieces (zero=3) on the stages of a pipeline,"
                    " and one of the two is pinned to something else"
                ),
            ),
            (
                groups == 1 or (not unstaged and sizes.get("stage", 2) > 1),
                (
                    f"accumulation={groups} is for the stages of a pipeline, and there are none;"
                    " without stages gradients are accumulated over microbatches"
                ),
            ),
            (
                read.get("microbatches", groups) % groups == 0,
                (
                    f"accumulation={groups} takes the microbatches in equal groups, and"
                    f" {read.get('microbatches')} are pinned"
                ),
            ),
            (
                read.get("pipeline") != "programs"
                or schedule is None
                or not schedule.allows(read.get("virtual_stages", 1), lockstep=True)
                or schedule.allows(read.get("virtual_stages", 1), lockstep=False),
                (
                    "pipeline='programs' has no stages that work breadth first"
                    f" (schedule={read.get('schedule')!r} with"
                    f" virtual_stages={read.get('virtual_stages')})"
                ),
            ),
            (
                read.get("pipeline") != "programs" or (not unstaged and sizes.get("stage", 2) > 1),
                "pipeline='programs' is for the stages of a pipeline, and there are none",
            ),
            (
                read.get("context", "none") == "none" or sizes.get("context", 2) > 1,
                f"context={read.get('context')!r} needs a context axis, which is pinned to 1",
            ),
            (
                read.get("context") != "none" or sizes.get("context", 1) == 1,
                (
                    "context='none' runs without a context axis, which is pinned to"
                    f" {sizes.get('context')}"
                ),
            ),
            (
                read.get("context") != "all-gather" or read.get("attention", "traced") == "traced",
                (
                    f"attention={read.get('attention')!r} sees the whole sequence, and"
                    " context='all-gather' leaves attention to the compiler as the model is"
                    " written"
                ),
            ),
            (
                read.get("context") != "ring"
                or read.get("attention", "blocks") in ("blocks", "traced"),
                (
                    "a ring computes attention in blocks, and attention is pinned to"
                    f" {read.get('attention')!r}"
                ),
            ),
            (
                read.get("experts") != "none" or sizes.get("expert", 1) == 1,
                (
                    "experts='none' runs without an expert axis, which is pinned to"
                    f" {sizes.get('expert')}"
                ),
            ),
            (
                not read.get("remat_layers") or read.get("remat") != "none",
                (
                    f"remat_layers={read.get('remat_layers')} recomputes layers, and remat is"
                    " pinned to 'none'"
                ),
            ),
            (
                not policies or read.get("remat", "none") in (*policies, "none"),
                f"remat={read.get('remat')!r} is the policy of no class that remat_classes names",
            ),
            (
                not policies or None in numbers or read.get("remat_layers") in (None, sum(numbers)),
                (
                    f"remat_layers={read.get('remat_layers')} are not as many layers as"
                    " remat_classes has"
                ),
            ),
        )
        if not unless
    ]
    alone = all(sizes.get(axis) == 1 for axis in STORED_AXES)
    if read.get("zero") and alone:
        found.append(f"zero={read['zero']} cuts over fsdp, which is pinned to 1")
    if read.get("zero") == 0 and sizes.get("fsdp", 1) > 1:
        found.append(
            f"zero=0 cuts nothing over fsdp, which is pinned to {sizes['fsdp']}; use the data axis"
            " instead"
        )
    if read.get("sequence_parallel") and sizes.get("tensor") == 1:
        found.append("sequence_parallel=True cuts the sequence over tensor, which is pinned to 1")
    return found


def check_rules(rules: Rules, colouring: Colouring) -> Rules:
    """Translates pinned rules to colours.

    Raises:
        PinError: a logical name that no dim has, or a cut that plans cannot express; all of them
            are listed.
    """
    failures: list[str] = []
    entries: list[tuple[str, tuple[str, ...]]] = []
    known = sorted(
        {
            *colouring.colours,
            *(alias for colour in colouring.colours.values() for alias in colour.aliases),
        }
    )
    for logical, axes in rules.entries:
        name = colouring.canonical(logical)
        if name is None:
            near = difflib.get_close_matches(logical, known, n=1)
            failures.append(
                f"no dim is named {logical!r}{f'; did you mean {near[0]!r}?' if near else ''}"
                f" (names are {', '.join(known)})"
            )
        else:
            entries.append((name, axes))
    if failures:
        raise_all(PinError, "pinned rules do not fit the model", failures)
    return Rules(tuple(entries))


def alias(word: str) -> str:
    """The pin word for a keyword such as `tensor` or `tp`: mesh axes become "mesh.tensor"."""
    return (
        f"mesh.{MESH_AXIS_ALIASES.get(word, word)}"
        if word in MESH_AXES or word in MESH_AXIS_ALIASES
        else word
    )
