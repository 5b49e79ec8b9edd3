"""Pins: decisions that a user fixes, their names, the rules between them, and the check that a plan
obeys them.

Pins use the names and values of a plan's JSON. A pinned `mesh` fixes every axis (those left out are
1); a dotted `mesh.tensor` fixes that one axis and leaves the others to the planner.

>>> pins = Pins.parse({"mesh.tensor": 8, "remat": "full"})
>>> pins.axes, pins.mesh is None, pins.remat
((('tensor', 8),), True, 'full')
>>> str(pins.replace(zero=3))
"mesh.tensor=8, zero=3, remat='full'"
>>> full_name("tp"), full_name("zero")
('mesh.tensor', 'zero')

A table of rules lists the pins that contradict each other, each with its message.

>>> print(*contradictions({"schedule": "1f1b"}, {"stage": 1}))
schedule='1f1b' needs stages, and the stage axis is pinned to 1
Try: mesh.stage=2 or more, or schedule='none'
>>> contradictions({"zero": 3, "remat": "full"}, {})
[]

Every plan is checked against its pins, except in decisions whose form differs between plans and
pins (`NOT_COMPARED`), so that no pin is ignored silently. A new decision that is not searched must
set `searched=False` in the table.

>>> from shardlib.decisions.table import Decisions
>>> require_obeyed(Pins.parse({"zero": 3, "remat": "full"}), Decisions(zero=3, remat="full"))
>>> require_obeyed(Pins.parse({"zero": 3}), Decisions(zero=2))
Traceback (most recent call last):
    ...
shardlib.errors.PlanError: the search did not obey its pins: zero is pinned to 3, and the plan has 2
Try: no such pin, and tell us; a decision that is not searched needs searched=False in the table
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from shardlib.decisions.table import (
    ANY,
    ANY_GROUP,
    DTYPES,
    TABLE,
    Allowed,
    DecisionEntry,
    Decisions,
    Dtypes,
    GroupPolicies,
    PinValue,
    ordered,
    read_allowed,
    read_dtype,
)
from shardlib.errors import HINT, PinError, PlanError, ShardlibError, hoisted, raise_all
from shardlib.exchanges import EXACT, Exchange
from shardlib.layout import (
    INNER_AXES,
    ISLAND,
    MESH_AXES,
    MESH_AXIS_ALIASES,
    STORED_AXES,
    MeshShape,
    Rules,
    mesh_axis,
)
from shardlib.schedules import Schedule, named, pipelines
from shardlib.untrusted.data import Json, JsonObject, shown

#: Everything that can be pinned: decisions, single dtypes, and dtypes that the planner may choose.
ENTRIES: Mapping[str, DecisionEntry] = {
    **TABLE,
    **{
        key: DecisionEntry(default=None, meaning="one of `dtypes`", choices={}, read=read_dtype)
        for key in DTYPES
    },
    "allow": DecisionEntry(
        default=(),
        meaning="dtypes that the planner may choose",
        choices={},
        read=read_allowed,
        write=lambda value, mesh: {what: list(dtypes) for what, dtypes in value},
    ),
}


def pin_data(key: str, value: PinValue) -> JsonObject:
    """One pin as plain data, by the names that a user writes.

    >>> pin_data("axes", (("tensor", 8),)), pin_data("offload", ())
    ({'mesh.tensor': 8}, {'offload': []})

    Args:
        key: name of a decision, or "axes" for single mesh axes.
    """
    if key == "axes":
        return {f"mesh.{axis}": size for axis, size in value}
    return {key: ENTRIES[key].write(value, MeshShape())}


def unknown_pin(key: str) -> str:
    """The message about a key that is not a decision, with the nearest one."""
    near = difflib.get_close_matches(key, [*ENTRIES, *(f"mesh.{axis}" for axis in MESH_AXES)], n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key!r} is not a decision{meant} (decisions are {', '.join(ENTRIES)} and mesh.AXIS)"


def full_names(pin: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Pins by their full names, from keywords such as `tensor` or `tp`.

    A keyword that is both a decision and a mesh axis, such as `context` or `pipeline`, is the axis
    where its value is a size.

    >>> full_names({"tp": 2, "context": 4}), full_names({"context": "ring"})
    ({'mesh.tensor': 2, 'mesh.context': 4}, {'context': 'ring'})

    Raises:
        PinError: two keywords that stand for the same pin have different values.
    """
    pins: dict[str, PinValue] = {}
    for keyword, value in pin.items():
        key = name_of_keyword(keyword, value)
        if str(pins.setdefault(key, value)) != str(value):
            raise PinError(f"{keyword}={value!r} contradicts {key}={pins[key]!r}{HINT}{key} once")
    return pins


def name_of_keyword(key: str, value: PinValue) -> str:
    """The full name of a pin that a keyword stands for: a mesh axis becomes "mesh.tensor", unless
    it is a decision as well and the value is not a size.

    >>> name_of_keyword("tensor", 8), name_of_keyword("context", 4)
    ('mesh.tensor', 'mesh.context')
    >>> name_of_keyword("context", "ring")
    'context'
    """
    return key if key in ENTRIES and isinstance(value, str) else full_name(key)


def full_name(key: str) -> str:
    """The full name of a pin, for a keyword such as `tensor` or `tp`: mesh axes become
    "mesh.tensor".
    """
    return (
        f"mesh.{MESH_AXIS_ALIASES.get(key, key)}"
        if key in MESH_AXES or key in MESH_AXIS_ALIASES
        else key
    )


@dataclass(frozen=True, kw_only=True)
class PinnedValues:
    """The decisions that pins fix.

    Attributes:
        values: pinned values by name; decisions left to the planner are absent.
        axes: sizes of the pinned mesh axes.
    """

    values: Mapping[str, Any]
    axes: Mapping[str, int]

    def get(self, key: str, default: PinValue = None) -> PinValue:
        """The pinned value, or `default` where it is left to the planner."""
        return self.values.get(key, default)

    def axis(self, name: str, default: int) -> int:
        """The pinned size of a mesh axis, or `default` where it is left to the planner."""
        return self.axes.get(name, default)

    @property
    def schedule(self) -> Schedule | None:
        """The pinned schedule; None where it is left to the planner."""
        return named(self.values["schedule"]) if "schedule" in self.values else None

    @property
    def may_be_staged(self) -> bool:
        """True if plans under these pins may have stages."""
        unstaged = self.schedule is not None and not self.schedule.staged
        return not unstaged and self.axis("stage", 2) > 1

    def allows_chunks(self, *, lockstep: bool) -> bool:
        """True if the pinned schedule, if there is one, allows the pinned chunks per stage."""
        chunks = self.get("virtual_stages", 1)
        return self.schedule is None or self.schedule.allows(chunks, lockstep=lockstep)

    @property
    def group_policies(self) -> GroupPolicies:
        """The policies of layer groups; () where the planner may choose them."""
        pinned = self.get("remat_classes", ())
        return () if pinned == ANY_GROUP else pinned

    @property
    def rematerialised_layers(self) -> list[int | None]:
        """Number of rematerialised layers of each group that has any; None: all of them."""
        return [layers for _, policy, layers in self.group_policies if policy != "none"]

    @property
    def absent_axes(self) -> list[str]:
        """The axes of the pinned order that are pinned to size 1."""
        return [axis for axis in self.get("axis_order", ()) if self.axis(axis, 2) == 1]


@dataclass(frozen=True, kw_only=True)
class PinConflict:
    """Decisions that exclude each other.

    Attributes:
        violated: True if pins contradict each other by this rule.
        message: the message: `{key}` is a pin's value, `{axes[name]}` the size of a mesh axis,
            `{chunked_schedules}` the schedules with chunks of layers, `{absent_axes}` the axes of
            `axis_order` that are pinned to 1.
        hint: the hint, with the same placeholders.
    """

    violated: Callable[[PinnedValues], bool]
    message: str
    hint: str


PIN_CONFLICTS: tuple[PinConflict, ...] = (
    PinConflict(
        violated=lambda pins: (
            pins.schedule is not None and pins.schedule.staged and pins.axis("stage", 2) == 1
        ),
        message="schedule={schedule!r} needs stages, and the stage axis is pinned to 1",
        hint="mesh.stage=2 or more, or schedule='none'",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.schedule is not None and not pins.schedule.staged and pins.axis("stage", 1) > 1
        ),
        message="schedule='none' runs without stages, and the stage axis is pinned to"
        " {axes[stage]}",
        hint="mesh.stage=1, or another schedule",
    ),
    PinConflict(
        violated=lambda pins: pins.get("virtual_stages", 1) > 1 and pins.axis("stage", 2) == 1,
        message="virtual_stages={virtual_stages} are chunks of the layers of a stage, and the stage"
        " axis is pinned to 1",
        hint="mesh.stage=2 or more, or virtual_stages=1",
    ),
    PinConflict(
        violated=lambda pins: not pins.allows_chunks(lockstep=True),
        message="virtual_stages={virtual_stages} needs the schedule {chunked_schedules}, and it is"
        " pinned to {schedule!r}",
        hint="virtual_stages=1, or another schedule",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("gather") == "once" and (pins.get("zero", 3) < 3 or pins.axis("stage", 2) == 1)
        ),
        message="gather='once' is for sharded weights (zero=3) on the stages of a pipeline, and one"
        " of the two is pinned to something else",
        hint="zero=3 with mesh.stage=2 or more, or gather='use'",
    ),
    PinConflict(
        violated=lambda pins: pins.get("accumulation", 1) > 1 and not pins.may_be_staged,
        message="accumulation={accumulation} is for the stages of a pipeline, and there are none;"
        " without stages gradients are accumulated over microbatches",
        hint="microbatches in place of accumulation, or mesh.stage=2 or more",
    ),
    PinConflict(
        violated=lambda pins: (
            "microbatches" in pins.values
            and pins.get("microbatches") % pins.get("accumulation", 1) > 0
        ),
        message="accumulation={accumulation} takes the microbatches in equal groups, and"
        " {microbatches} are pinned",
        hint="a multiple of {accumulation} as microbatches",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("pipeline") == "programs"
            and pins.allows_chunks(lockstep=True)
            and not pins.allows_chunks(lockstep=False)
        ),
        message="pipeline='programs' has no stages that work breadth first (schedule={schedule!r}"
        " with virtual_stages={virtual_stages})",
        hint="pipeline='lockstep', or virtual_stages=1",
    ),
    PinConflict(
        violated=lambda pins: pins.get("pipeline") == "programs" and not pins.may_be_staged,
        message="pipeline='programs' is for the stages of a pipeline, and there are none",
        hint="pipeline='lockstep', or mesh.stage=2 or more with a schedule",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("context", "none") != "none" and pins.axis("context", 2) == 1
        ),
        message="context={context!r} needs a context axis, which is pinned to 1",
        hint="mesh.context=2 or more, or context='none'",
    ),
    PinConflict(
        violated=lambda pins: pins.get("context") == "none" and pins.axis("context", 1) > 1,
        message="context='none' runs without a context axis, which is pinned to {axes[context]}",
        hint="mesh.context=1, or another context",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("context") == "all-gather" and pins.get("attention", "traced") != "traced"
        ),
        message="attention={attention!r} sees the whole sequence, and context='all-gather' leaves"
        " attention to the compiler as the model is written",
        hint="attention='traced', or another context",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("context") == "ring"
            and pins.get("attention", "blocks") not in ("blocks", "traced")
        ),
        message="a ring computes attention in blocks, and attention is pinned to {attention!r}",
        hint="attention='blocks', or another context",
    ),
    PinConflict(
        violated=lambda pins: pins.get("experts") == "none" and pins.axis("expert", 1) > 1,
        message="experts='none' runs without an expert axis, which is pinned to {axes[expert]}",
        hint="mesh.expert=1, or no pin of experts",
    ),
    PinConflict(
        violated=lambda pins: pins.get("remat_layers", 0) > 0 and pins.get("remat") == "none",
        message="remat_layers={remat_layers} rematerialises layers, and remat is pinned to 'none'",
        hint="remat='full', or remat_layers=0",
    ),
    PinConflict(
        violated=lambda pins: (
            len(pins.group_policies) > 0
            and pins.get("remat", "none")
            not in ("none", *(policy for _, policy, _ in pins.group_policies))
        ),
        message="remat={remat!r} is the policy of no layer group that remat_classes names",
        hint="remat_classes alone",
    ),
    PinConflict(
        violated=lambda pins: (
            len(pins.group_policies) > 0
            and None not in pins.rematerialised_layers
            and pins.get("remat_layers")
            not in (None, sum(filter(None, pins.rematerialised_layers)))
        ),
        message="remat_layers={remat_layers} are not as many layers as remat_classes has",
        hint="remat_classes alone",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("zero", 0) > 0 and all(pins.axis(axis, 0) == 1 for axis in STORED_AXES)
        ),
        message="zero={zero} shards over fsdp, which is pinned to 1",
        hint="mesh.fsdp=2 or more, or zero=0",
    ),
    PinConflict(
        violated=lambda pins: pins.get("zero") == 0 and pins.axis("fsdp", 1) > 1,
        message="zero=0 shards nothing over fsdp, which is pinned to {axes[fsdp]}",
        hint="mesh.data in place of mesh.fsdp, or zero=1, 2 or 3",
    ),
    PinConflict(
        violated=lambda pins: pins.get("sequence_parallel", False) and pins.axis("tensor", 0) == 1,
        message="sequence_parallel=True shards the sequence over tensor, which is pinned to 1",
        hint="mesh.tensor=2 or more, or sequence_parallel=False",
    ),
    PinConflict(
        violated=lambda pins: len(pins.absent_axes) > 0,
        message="axis_order names {absent_axes}, and the pinned mesh has no such axis",
        hint="axis_order without {absent_axes}, or a mesh that has it",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.get("axis_order") == () and any(pins.axis(axis, 2) > 1 for axis in INNER_AXES)
        ),
        message="axis_order is [], which names no mesh axis",
        hint="axis_order=['stage', 'data', 'tensor'], or no pin of axis_order",
    ),
    PinConflict(
        violated=lambda pins: (
            pins.axis("island", 1) not in (1, pins.get("exchange", EXACT).islands)
        ),
        message="mesh.island={axes[island]} are islands, which are pinned with how they meet",
        hint="exchange='diloco:{axes[island]}:100', and no pin of mesh.island",
    ),
)


def contradictions(pins: Mapping[str, PinValue], axes: Mapping[str, int]) -> list[str]:
    """Lists the contradictions between pins, each with a second line "Try: ..."."""
    mesh: MeshShape | None = pins.get("mesh")
    failures = [
        f"mesh.{axis}={size} contradicts mesh={dict(mesh)}{HINT}mesh, or mesh.{axis} alone"
        for axis, size in axes.items()
        if mesh is not None and mesh[axis] != size
    ]
    sizes = dict(axes) if mesh is None else {axis: mesh[axis] for axis in MESH_AXES}
    pinned = PinnedValues(values=pins, axes=sizes)
    violated = [conflict for conflict in PIN_CONFLICTS if conflict.violated(pinned)]
    if not violated:
        return failures
    placeholders = {
        **pins,
        "axes": sizes,
        "chunked_schedules": _chunked_schedules(),
        "absent_axes": ", ".join(pinned.absent_axes),
    }
    return failures + [
        f"{conflict.message}{HINT}{conflict.hint}".format_map(placeholders) for conflict in violated
    ]


def _chunked_schedules() -> str:
    """The schedules whose stages may have several chunks of layers; first those that are never
    tried with one chunk.
    """
    names = [
        schedule.name
        for schedule in sorted(pipelines(), key=_tried_unchunked)
        if schedule.allows(2, lockstep=True)
    ]
    return " or ".join(map(repr, names))


def _tried_unchunked(schedule: Schedule) -> bool:
    return 1 in schedule.chunk_options(pinned=True, chunks=None, policy="none", limit=2)


#: Decisions fixed by hand, by their names in a plan's JSON: plain data, or the values that it
#: stands for.
PinMapping = Mapping[str, PinValue]
T = TypeVar("T")
#: Names of pins in order; `axes` are single mesh axes, (name, size).
_ORDER: tuple[str, ...] = ("mesh", "axes", *(key for key in TABLE if key != "mesh"), "allow")
#: Pins for which () leaves the decision to the planner; for others () is a value.
_COLLECTIONS = ("axes", "remat_classes", "dtypes", "allow")


class _Pinned(Generic[T]):
    """Descriptor: the pinned value of the decision whose name it has, or `absent` where the
    decision is left to the planner.
    """

    def __init__(self, absent: T) -> None:
        self._absent = absent

    def __set_name__(self, owner: type[Pins], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, pins: None, owner: type[Pins]) -> _Pinned[T]: ...
    @overload
    def __get__(self, pins: Pins, owner: type[Pins]) -> T: ...
    def __get__(self, pins: Pins | None, owner: type[Pins]) -> T | _Pinned[T]:
        return self if pins is None else dict(pins.fixed).get(self._name, self._absent)


@dataclass(frozen=True)
class Pins:
    """Decisions fixed by hand; None (or empty) leaves a decision to the planner.

    The attributes are typed views of `fixed`, for the decisions that the planner reads.

    Attributes:
        fixed: (name, value) of the fixed decisions; `axes` are single mesh axes, (name, size);
            `allow` is (dtype decision, dtypes) that the planner may choose besides those of the
            traced model.
    """

    fixed: tuple[tuple[str, Any], ...] = ()

    mesh = _Pinned[MeshShape | None](None)
    axes = _Pinned[tuple[tuple[str, int], ...]](())
    rules = _Pinned[Rules | None](None)
    sequence_parallel = _Pinned[bool | None](None)
    zero = _Pinned[int | None](None)
    remat = _Pinned[str | None](None)
    remat_layers = _Pinned[int | None](None)
    remat_classes = _Pinned[GroupPolicies](())
    microbatches = _Pinned[int | None](None)
    accumulation = _Pinned[int | None](None)
    schedule = _Pinned[str | None](None)
    virtual_stages = _Pinned[int | None](None)
    gather = _Pinned[str | None](None)
    pipeline = _Pinned[str | None](None)
    context = _Pinned[str | None](None)
    attention = _Pinned[str | None](None)
    experts = _Pinned[str | None](None)
    collective_matmul = _Pinned[str | None](None)
    offload = _Pinned[tuple[str, ...] | None](None)
    optimizer_layout = _Pinned[str | None](None)
    axis_order = _Pinned[tuple[str, ...] | None](None)
    exchange = _Pinned[Exchange](EXACT)
    dtypes = _Pinned[Dtypes](())
    allow = _Pinned[Allowed](())

    @classmethod
    def of(cls, **values: PinValue) -> Pins:
        """Pins from values that have been read; None leaves a decision to the planner."""
        return cls(
            tuple(
                (key, values[key])
                for key in _ORDER
                if values.get(key) is not None and not (key in _COLLECTIONS and not values[key])
            )
        )

    @classmethod
    def parse(cls, pin: PinMapping | Pins | None) -> Pins:
        """Reads pins."""
        if isinstance(pin, Pins):
            return pin
        if not isinstance(pin, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PinError(f"pins are a mapping such as {{'zero': 3}}; these are {shown(pin)}")
        failures: list[str] = []
        read: dict[str, Any] = {}
        axes: dict[str, int] = {}
        dtypes: dict[str, str] = {}
        for key, value in (pin or {}).items():
            try:
                if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                    failures.append(
                        f"{key!r} is not a decision; a decision is a word such as 'zero'"
                    )
                    continue
                key = name_of_keyword(key, value)
                if key.startswith("mesh."):
                    axis = mesh_axis(key.removeprefix("mesh."))
                    size = MeshShape({axis: value})[axis]
                    if axes.setdefault(axis, size) != size:
                        failures.append(
                            f"{key}={size} contradicts mesh.{axis}={axes[axis]}"
                            f"{HINT}mesh.{axis} once"
                        )
                elif key in DTYPES:
                    dtypes[key] = read_dtype(key, value)
                elif key in ENTRIES:
                    read[key] = ENTRIES[key].read(key, value)
                else:
                    failures.append(unknown_pin(key))
            except ShardlibError as error:
                failures += _messages(key, error)
        failures += contradictions(read, axes)
        failures += [
            f"{key}={dtypes[key]!r} contradicts dtypes={{{key!r}: {dtype!r}}}{HINT}{key} once"
            for key, dtype in read.get("dtypes", ())
            if dtypes.get(key, dtype) != dtype
        ]
        if failures:
            messages, hint = hoisted(failures)
            raise_all(PinError, "pins are not usable", messages, hint=hint)
        read["axes"] = () if "mesh" in read else tuple(sorted(axes.items()))
        read["dtypes"] = ordered({**dict(read.get("dtypes", ())), **dtypes})
        return cls.of(**read)

    def get(self, key: str) -> PinValue:
        """The pinned value of a decision; None where it is left to the planner."""
        return dict(self.fixed).get(key)

    def replace(self, **changes: PinValue) -> Pins:
        """These pins with some replaced; None, or () for a collection, leaves a decision to the
        planner.
        """
        return Pins.of(**{**dict(self.fixed), **changes})

    @property
    def of_one_island(self) -> Pins:
        """The pins for the plan of one of several islands."""
        order = self.axis_order
        return self.replace(
            exchange=None,
            axes=tuple((axis, size) for axis, size in self.axes if axis != ISLAND.name),
            mesh=None if self.mesh is None else self.mesh.of_one_island,
            axis_order=None if order is None else tuple(a for a in order if a != ISLAND.name),
        )

    def changed(self, other: Pins) -> Pins:
        """These pins overridden by others; a mesh or an axis of the others replaces all pinned
        axes.
        """
        sizes = {"mesh", "axes"}
        replaced = other._by_name.keys() | (sizes if other._by_name.keys() & sizes else set())
        remaining = Pins.of(**{key: value for key, value in self.fixed if key not in replaced})
        both = remaining.replace(**other._by_name)
        if failures := contradictions(both._by_name, dict(both.axes)):
            messages, hint = hoisted(failures)
            raise_all(PinError, f"{other} is not usable beside {remaining}", messages, hint=hint)
        return both

    @property
    def _by_name(self) -> dict[str, Any]:
        """The pinned values; () is a value, such as for an empty `offload`."""
        return dict(self.fixed)

    @property
    def unsearched(self) -> Decisions:
        """Decisions that the planner does not search, as pinned or by default; all others by
        default.
        """
        return Decisions(
            **{key: value for key, value in self.fixed if key in TABLE and not TABLE[key].searched}
        )

    @property
    def unstaged(self) -> bool:
        """True if a schedule without stages is pinned."""
        return self.schedule is not None and not named(self.schedule).staged

    @property
    def always_staged(self) -> bool:
        """True if all plans under the pins have stages."""
        sizes = dict(self.mesh or self.axes)
        return (
            sizes.get("stage", 1) > 1
            or (self.schedule is not None and named(self.schedule).staged)
            or (self.accumulation or 1) > 1
            or (self.virtual_stages or 1) > 1
            or self.pipeline == "programs"
            or self.gather == "once"
        )

    def without(self) -> dict[str, Pins]:
        """For every pin, by its name, the pins without it; used to find which pin to relax. Single
        mesh axes are relaxed together.
        """
        return {
            " and ".join(pin_data(key, value)): Pins(
                tuple(pin for pin in self.fixed if pin[0] != key)
            )
            for key, value in self.fixed
        }

    def to_json(self) -> JsonObject:
        """The pins as plain data, which `parse` reads."""
        return {key: plain for pin in self.fixed for key, plain in pin_data(*pin).items()}

    def __str__(self) -> str:
        words = (f"{key}={shown(value)}" for key, value in self.to_json().items())
        return ", ".join(words) or "nothing"


def _messages(key: str, error: ShardlibError) -> list[str]:
    """Messages about the wrong value of a pin, prefixed with the name of the decision."""
    if not error.failures:
        return [str(error)]
    decision = key.partition(".")[0]
    return [
        failure if decision in failure else f"{decision}: {failure}" for failure in error.failures
    ]


#: Decisions whose form differs between plans and pins: plans complete the rules, count layers in
#: the fullest stage, and omit dtypes of the traced model.
NOT_COMPARED: tuple[str, ...] = ("rules", "remat_layers", "remat_classes", "dtypes")


def require_obeyed(pins: Pins, plan: Decisions) -> None:
    """Raises if a plan differs from its pins; those in `NOT_COMPARED` are not compared."""
    violations = [
        f"{key} is pinned to {_plain(key, value)!r}, and the plan has {_plain(key, planned)!r}"
        for key, value, planned in _compared(pins, plan)
        if value not in (ANY, planned)
    ]
    if violations:
        raise_all(
            PlanError,
            "the search did not obey its pins",
            violations,
            hint="no such pin, and tell us; a decision that is not searched needs searched=False in"
            " the table",
        )


def _compared(pins: Pins, plan: Decisions) -> Iterator[tuple[str, PinValue, PinValue]]:
    """(name, pinned value, planned value) of all pins that can be compared."""
    for key, value in pins.fixed:
        if key == "axes":
            yield from ((f"mesh.{axis}", size, plan.mesh[axis]) for axis, size in value)
        elif key == "axis_order":
            yield key, plan.mesh.in_order(value), plan.axis_order or tuple(plan.mesh)
        elif key in TABLE and key not in NOT_COMPARED:
            yield key, value, getattr(plan, key)


def _plain(key: str, value: PinValue) -> Json:
    """A value as a user writes it; the size of a single mesh axis unchanged."""
    return TABLE[key].write(value, MeshShape()) if key in TABLE else value
