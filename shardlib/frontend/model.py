"""Checks of the arguments of the public functions, and the traced model, with the layouts that it
brings along.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AbstractMesh

from shardlib.annotation.model import Init, LinenInit, no_mesh, planning_mesh, read
from shardlib.annotation.names import Model, PureLoss
from shardlib.annotation.trees import Filter, Tree
from shardlib.decisions.pins import PinMapping, Pins
from shardlib.errors import (
    AnnotationError,
    ArgumentError,
    InfeasibleError,
    PinError,
    TracingError,
    raise_all,
)
from shardlib.findings import Finding, diagnostic
from shardlib.graph import Problem
from shardlib.jax_types import Jaxpr
from shardlib.layout import BATCH_AXES, MESH_AXIS_ALIASES, LogicalAxes
from shardlib.machines.topology import Topology, devices_of
from shardlib.planner.plan import Plan
from shardlib.planner.search import rare_garbage_collection
from shardlib.propagation.colours import Colouring, colour
from shardlib.tracing.layouts import (
    NO_MESH,
    UserLayout,
    brings_layouts,
    has_mesh_or_rules,
    layout_free,
)
from shardlib.tracing.trace import LayoutOfValue, Traced, abstract, trace
from shardlib.untrusted.data import Kind, require_kinds

# --------------------------------------------------------------------------------------------------
# Layouts that a program brings along, as priced hints or as pins.
#
# A layout speaks of dims by their colours and of the user's mesh axes. The axes are read by what
# they shard: those of the batch are `data` and `fsdp`, those of a sequence `context`, those of
# experts `expert`, all others together `tensor`; an axis with a name of ours keeps it. With
# `honour="hints"` the plan is made as if there were none, and a finding lists what each would
# cost; with `honour="pins"` all of them are pins.
#
#     P("data", "model") of 4 x 2 on [batch, mlp]   ->   mesh.data=4, mesh.fsdp=1, mesh.tensor=2,
#                                                        rules batch -> data·fsdp, mlp -> tensor

#: What a user may say of them.
HONOURS: tuple[str, ...] = ("hints", "pins")
#: Most searches for what layouts cost.
MOST_PRICED = 8
#: Most layouts that a finding names.
MOST_NAMED = 12
_EXPERTS = ("expert", "experts")


def require_honour(honour: object) -> None:
    """Refuses anything but one of `HONOURS`."""
    if honour not in HONOURS:
        raise ArgumentError(
            f"honour is {honour!r}; layouts of the program are 'hints', which a finding prices, or"
            " 'pins'\nTry: honour='hints'"
        )


@dataclass(frozen=True, kw_only=True)
class _Coloured:
    """A layout with the colours of the dims that it speaks of."""

    layout: UserLayout
    colours: LogicalAxes

    @property
    def sharded(self) -> list[tuple[str, tuple[str, ...]]]:
        """(colour, the user's mesh axes) of the dims that it decides."""
        pairs = zip(self.colours, self.layout.spec, strict=True)
        return [(name, axes) for name, axes in pairs if name is not None and axes is not None]

    @property
    def text(self) -> str:
        """It and where it stands."""
        place = f" at {self.layout.line}" if self.layout.line else ""
        return f"{self.layout}{place}"


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts that a program brings along, as the colours of a problem have them.

    Attributes:
        every: each once.
        colouring: of the problem.
    """

    every: tuple[_Coloured, ...]
    colouring: Colouring

    @staticmethod
    def of(layouts: Iterable[LayoutOfValue], colouring: Colouring) -> Layouts:
        """The layouts of a traced program."""
        read = (
            _Coloured(layout=layout, colours=colouring.forward[value])
            for layout, value in layouts
            # what stands in a `shard_map` speaks of a shard
            if len(layout.spec) == len(colouring.forward[value])
        )
        return Layouts(every=tuple(dict.fromkeys(read)), colouring=colouring)

    @property
    def written(self) -> dict[str, list[_Coloured]]:
        """The layouts by what the user wrote and where: one line may speak of several layers."""
        by_text: dict[str, list[_Coloured]] = defaultdict(list)
        for layout in self.every:
            by_text[layout.text].append(layout)
        return by_text

    def kind(self, name: str) -> str:
        """Returns which kind of mesh axes shards a colour: "batch", "sequence", "expert" or
        "tensor".
        """
        if name == self.colouring.batch_colour:
            return "batch"
        if name == self.colouring.named_sequence:
            return "sequence"
        experts = {self.colouring.canonical(name) for name in _EXPERTS}
        return "expert" if name in experts else "tensor"

    def stored(self, layout: _Coloured) -> bool:
        """Returns whether a layout is one of an array without rows of the batch, as weights are."""
        return self.colouring.batch_colour not in layout.colours

    def axes(self) -> tuple[dict[str, str], list[str]]:
        """Our mesh axis for each of the user's that shards something, and contradictions."""
        kinds: dict[str, dict[str, _Coloured]] = defaultdict(dict)
        for layout in self.every:
            for name, axes in layout.sharded:
                for axis in axes:
                    kind = self.kind(name)
                    ours = MESH_AXIS_ALIASES.get(axis, axis)
                    stored = kind == "tensor" and self.stored(layout)
                    if stored and (ours in BATCH_AXES or "batch" in kinds[axis]):
                        kind = "stored"
                    kinds[axis].setdefault(kind, layout)
        ours_by_axis: dict[str, str] = {}
        failures: list[str] = []
        for axis, of in kinds.items():
            if "batch" in of and "tensor" in of and self.stored(of["tensor"]):
                of["stored"] = of.pop("tensor")  # a weight that was met before the batch
            ours = MESH_AXIS_ALIASES.get(axis, axis)
            match frozenset(of):
                case s if s <= {"batch", "stored"}:
                    free = "fsdp" if "stored" in of or "data" in ours_by_axis.values() else "data"
                    ours_by_axis[axis] = ours if ours in ("data", "fsdp") else free
                case s if s <= {"batch", "expert"}:
                    ours_by_axis[axis] = "expert"
                case s if s == {"sequence"} and ours != "tensor":
                    ours_by_axis[axis] = "context"
                case s if s <= {"tensor", "sequence"}:
                    ours_by_axis[axis] = "tensor"
                case _:
                    both = [f"{kind} dims by {layout.text}" for kind, layout in of.items()]
                    failures.append(f"mesh axis {axis!r} shards {' and '.join(both)}")
        return ours_by_axis, failures

    def pins(self, chosen: Sequence[_Coloured]) -> dict[str, Any]:
        """The pins that some of the layouts amount to; "rules" holds pairs of which the planner's
        own come last.
        """
        ours_by_axis, failures = self.axes()
        used = {axis for layout in chosen for axis in layout.layout.names}
        failures = [
            failure for failure in failures if any(f"axis {axis!r} " in failure for axis in used)
        ]
        sizes: dict[str, dict[str, int]] = defaultdict(dict)
        for layout in chosen:
            partial = len(chosen) < len(self.every)
            spoken = ours_by_axis.keys() & layout.layout.names if partial else ours_by_axis.keys()
            for axis, size in layout.layout.mesh:
                if axis in spoken and sizes[ours_by_axis[axis]].setdefault(axis, size) != size:
                    failures.append(
                        f"mesh axis {axis!r} has size {sizes[ours_by_axis[axis]][axis]} and, by"
                        f" {layout.text}, {size}"
                    )
        failures += self._ambiguous(chosen, ours_by_axis)
        if failures:
            raise_all(
                PinError,
                "the layouts of the program are not pins of one plan",
                list(dict.fromkeys(failures)),
                hint="honour='hints', which lists them and imposes none; or take out those that"
                " contradict",
            )
        mesh = {ours: math.prod(of.values()) for ours, of in sizes.items()}
        pins: dict[str, Any] = {f"mesh.{ours}": size for ours, size in mesh.items()}
        if mesh.keys() & {"data", "fsdp"}:
            pins = {f"mesh.{ours}": mesh.get(ours, 1) for ours in ("data", "fsdp")} | pins
        if any(
            ours_by_axis.get(axis) == "fsdp" and self.kind(name) == "tensor"
            for layout in chosen
            for name, axes in layout.sharded
            for axis in axes
        ):
            pins["zero"] = 3
        tensor = self._over_tensor(chosen, ours_by_axis)
        if tensor or self._whole(chosen, ours_by_axis):
            pins["rules"] = tensor
        if self.colouring.named_sequence in tensor:
            pins["sequence_parallel"] = True
        return pins

    def _over_tensor(
        self, chosen: Sequence[_Coloured], ours_by_axis: Mapping[str, str]
    ) -> list[str]:
        """Colours that the layouts shard over tensor, in their order."""
        return list(
            dict.fromkeys(
                name
                for layout in chosen
                for name, axes in layout.sharded
                if any(ours_by_axis.get(axis) == "tensor" for axis in axes)
            )
        )

    def _whole(
        self, chosen: Sequence[_Coloured], ours_by_axis: Mapping[str, str]
    ) -> dict[str, _Coloured]:
        """Colours that the layouts leave whole where nothing else of the array is sharded over
        tensor.
        """
        return {
            name: layout
            for layout in chosen
            if not any(ours_by_axis.get(axis) == "tensor" for axis in layout.layout.names)
            for name, axes in layout.sharded
            if not axes and self.kind(name) in ("tensor", "sequence") and not self.stored(layout)
        }

    def _ambiguous(self, chosen: Sequence[_Coloured], ours_by_axis: Mapping[str, str]) -> list[str]:
        failures: list[str] = []
        unsharded = self._whole(chosen, ours_by_axis)
        groups: dict[frozenset[str], _Coloured] = {}
        spread: dict[str, tuple[frozenset[str], _Coloured]] = {}
        batch = self.colouring.batch_colour
        for layout in chosen:
            for name, axes in layout.sharded:
                tensor = frozenset(axis for axis in axes if ours_by_axis.get(axis) == "tensor")
                if tensor:
                    groups.setdefault(tensor, layout)
                    if name in unsharded:
                        failures.append(
                            f"{name!r} is sharded by {layout.text} and whole by"
                            f" {unsharded[name].text}"
                        )
                if name == batch:
                    axes_of_batch = frozenset(axes)
                    first_axes, by = spread.setdefault(name, (axes_of_batch, layout))
                    if first_axes != axes_of_batch:
                        failures.append(
                            f"{name!r} is sharded over"
                            f" {', '.join(sorted(first_axes)) or 'nothing'} by {by.text} and over"
                            f" {', '.join(sorted(axes_of_batch)) or 'nothing'} by {layout.text}"
                        )
        if len(groups) > 1:
            texts = [
                f"{', '.join(sorted(axes))} by {layout.text}" for axes, layout in groups.items()
            ]
            failures.append(
                f"different mesh axes shard dims that a plan shards over tensor: {'; '.join(texts)}"
            )
        return failures

    def complete(
        self, pins: Mapping[str, Any], pin: PinMapping | Pins | None, search: Callable[[Pins], Plan]
    ) -> Pins:
        """The pins beside those of the user, with rules for the colours that no layout speaks of:
        those are sharded as the planner shards them on that mesh.
        """
        user_pins = Pins.parse(pin)
        failures: list[str] = []
        for word, value in pins.items():
            axis = word.removeprefix("mesh.")
            fixed: Any = user_pins.get(word)
            if word.startswith("mesh."):
                mesh = user_pins.mesh if user_pins.mesh is not None else dict(user_pins.axes)
                fixed = mesh[axis] if user_pins.mesh is not None else mesh.get(axis)
            elif word == "rules" and user_pins.rules is not None:
                fixed = user_pins.rules
            if fixed is not None and fixed != value:
                failures.append(
                    f"{word} is pinned to {fixed} and the program's layouts say {value}"
                )
        if failures:
            raise_all(
                PinError,
                "pins contradict the layouts of the program",
                failures,
                hint="leave the pin out, or honour='hints'",
            )
        sizes = {word: size for word, size in pins.items() if word.startswith("mesh.")}
        beside = {} if user_pins.mesh is not None else sizes
        others = {word: pins[word] for word in ("zero", "sequence_parallel") if word in pins}
        begun = user_pins.changed(Pins.parse(others)) if others else user_pins
        if beside:
            begun = begun.replace(
                axes=tuple(sorted({**dict(user_pins.axes), **_named(beside)}.items()))
            )
        if "rules" not in pins:
            return begun
        tensor = list(pins["rules"])
        ours_by_axis, _ = self.axes()
        unsharded = self._whole(self.every, ours_by_axis)
        free = search(begun)
        entries = free.rules.entries
        tensor += [
            name
            for name, axes in entries
            if "tensor" in axes and name not in tensor and name not in unsharded
        ]
        batch = self.colouring.batch_colour
        rules = [(batch, ["data", "fsdp"])] if batch is not None else []
        rules += [(name, ["tensor"]) for name in tensor]
        return begun.changed(Pins.parse({"rules": rules}))


def _named(sizes: Mapping[str, int]) -> dict[str, int]:
    return {word.removeprefix("mesh."): size for word, size in sizes.items()}


def layout_pins(
    layouts: Sequence[LayoutOfValue],
    problem: Problem,
    pin: PinMapping | Pins | None,
    search: Callable[[Pins], Plan],
) -> PinMapping | Pins | None:
    """The user's pins, with all layouts of the program as pins."""
    if not layouts:
        return pin
    of_program = Layouts.of(layouts, colour(problem))
    return of_program.complete(of_program.pins(of_program.every), pin, search)


@diagnostic
def layout_findings(
    layouts: Sequence[LayoutOfValue],
    problem: Problem,
    plan: Plan,
    pin: PinMapping | Pins | None,
    honour: str,
    search: Callable[[Pins], Plan],
) -> tuple[Finding, ...]:
    """Returns what became of the layouts of a program: one finding, or none where it brings
    none.
    """
    if not layouts:
        return ()
    of_program = Layouts.of(layouts, colour(problem))
    if not of_program.every:
        return ()
    fixed = Pins.parse(pin)
    on_mesh = fixed.mesh is not None or bool(fixed.axes)
    lines: list[str] = []
    costs: dict[str, str] = {}

    def cost(chosen: Sequence[_Coloured]) -> str:
        try:
            pins = of_program.pins(chosen)
            if on_mesh:  # as it would be on the mesh that the user fixed
                pins = {word: value for word, value in pins.items() if not word.startswith("mesh.")}
            key = repr(sorted(pins.items(), key=lambda item: item[0]))
            if key not in costs:
                if len(costs) >= MOST_PRICED:
                    return "not priced"
                priced = search(of_program.complete(pins, _without(pin, pins), search))
                costs[key] = _difference(plan, priced)
            return costs[key]
        except (PinError, InfeasibleError) as error:
            return f"no plan has it: {[*error.failures, *str(error).splitlines()][0].strip()}"

    if honour == "pins":
        free = search(Pins.parse(pin))
        spent = _difference(free, plan)
        lines = list(of_program.written)
        message = (
            f"the program's own layouts are pins of this plan, {spent} than without them"
            if spent != "as fast"
            else "the program's own layouts are pins of this plan, which is as fast as without them"
        )
    else:
        written = list(of_program.written.items())
        lines = [f"{text}: {cost(ones)}" for text, ones in written[:MOST_NAMED]]
        if len(written) > 1:
            lines.append(f"all together: {cost(of_program.every)}")
        message = (
            f"the program brings layouts of its own ({len(written)}), and none of them is"
            " imposed; what a step of the best plan with each would take beside this one"
        )
    more = len(of_program.written) - MOST_NAMED
    if more > 0:
        lines = [*lines[:MOST_NAMED], f"{more} more", *lines[MOST_NAMED:][-1:]]
    return (
        Finding(
            code="own-layouts",
            severity="info",
            message=f"{message}: {'; '.join(lines)}" if lines else message,
            where=", ".join(
                dict.fromkeys(
                    layout.layout.line for layout in of_program.every if layout.layout.line
                )
            ),
            hint="honour='pins' imposes them" if honour == "hints" else "",
        ),
    )


def _without(pin: PinMapping | Pins | None, pins: Mapping[str, Any]) -> Pins:
    """The user's pins without those that a layout decides."""
    words = ("rules", "zero", "sequence_parallel")
    return Pins.parse(pin).replace(**{word: None for word in words if word in pins})


def _difference(plan: Plan, changed: Plan) -> str:
    """Returns how much longer a step of another plan takes."""
    before, after = plan.estimate.step_seconds, changed.estimate.step_seconds
    more = after - before
    if abs(more) <= 1e-3 * before:
        return "as fast"
    words = f"{abs(more) * 1e3:.3g} ms {'slower' if more > 0 else 'faster'}"
    return f"{words} ({before * 1e3:.3g} -> {after * 1e3:.3g} ms)"


# --------------------------------------------------------------------------------------------------
# Checks of the arguments of the public functions.


def _transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _devices(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and all(
        isinstance(device, jax.Device) for device in np.asarray(value, object).flat
    )


def _guards(value: Any) -> bool:
    # Whoever has guards has loaded the lowering; planning does without it.
    from shardlib.lowering.step import Guards

    return isinstance(value, Guards)


_KINDS: Mapping[str, Kind] = {
    "loss": (callable, "a function", "loss=lambda model, batch: jnp.mean(...)"),
    "evaluation": (callable, "a function", "evaluation=lambda model, batch: jnp.mean(...)"),
    "optimizer": (_transformation, "an optax transformation", "optimizer=optax.adam(1e-3)"),
    "batch": (
        lambda value: not isinstance(value, (bool, int, float, complex, str, bytes)),
        "a tree of arrays, of which the leading dim is the number of rows",
        'batch={"x": jax.ShapeDtypeStruct((64, 128), jnp.float32)}',
    ),
    "topology": (
        lambda value: isinstance(value, (str, Topology)) or devices_of(value) is not None,
        "a topology",
        'topology="cpu:8", a jax.sharding.Mesh, or a list of devices',
    ),
    "pin": (
        lambda value: isinstance(value, (Mapping, Pins)),
        "a mapping of decisions",
        'pin={"mesh": {"data": 8}}',
    ),
    "allow": (
        lambda value: isinstance(value, Mapping),
        "a mapping of dtypes",
        'allow={"moment_dtype": ["bfloat16"]}',
    ),
    "limits": (
        lambda value: hasattr(value, "seconds") and hasattr(value, "memory_bytes"),
        "limits of a compiler",
        "limits=shardlib.verification.isolation.Limits(seconds=600.0)",
    ),
    "name": (lambda value: isinstance(value, str), "a string", 'name="model"'),
    "framework": (
        lambda value: isinstance(value, str),
        "the name of a framework",
        'framework="megatron-core"',
    ),
    "plan": (
        lambda value: isinstance(value, Plan),
        "a plan",
        "plan=shardlib.plan(...), or plan=shardlib.Plan.from_json(text)",
    ),
    "devices": (_devices, "a list of devices", "devices=jax.devices()"),
    "guards": (_guards, "guards", "guards=shardlib.Guards(clip=1.0)"),
    "disk": (
        lambda value: isinstance(value, (str, os.PathLike)),
        "the path of a folder",
        'disk="/path"',
    ),
    "compiler_options": (
        lambda value: isinstance(value, Mapping),
        "a mapping of options",
        'compiler_options={"xla_gpu_enable_pipelined_all_gather": True}',
    ),
}
#: Those that cannot be left out.
_NEEDED = ("loss", "optimizer")


def require_arguments(asked: str, **given: object) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        given: arguments by name; None where one is left out.
    """
    require_kinds(asked, _KINDS, given, needed=_NEEDED)


# --------------------------------------------------------------------------------------------------
# A model that has been read and whose loss has been traced: annotate and trace.

#: The user's loss: (model, batch) -> scalar, or -> (scalar, dict of metrics).
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model that has been read, and what was traced of it.

    Attributes:
        model: as it was read.
        traced: its loss.
        loss: (model, batch) -> scalar or (scalar, metrics).
        optimizer: what trains it.
        batch: the global batch, arrays or their shapes and dtypes.
        honour: what layouts of the program are, "hints" or "pins".
    """

    model: Model
    traced: Traced
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Tree
    honour: str = "hints"


def pinned_activations(jaxpr: Jaxpr) -> int:
    """Number of layout constraints on activations in a program."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(
        (eqn.primitive.name == "sharding_constraint") + sum(map(pinned_activations, _inside(eqn)))
        for eqn in inner.eqns
    )


def _inside(eqn: Any) -> list[Any]:
    return [
        item
        for value in eqn.params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        if hasattr(item, "eqns")
    ]


@diagnostic
def ignored_constraints(
    loss: PureLoss, params: Tree, state: Tree, batch: Tree
) -> tuple[Finding, ...]:
    """A finding if a loss has Flax's logical constraints that are ignored because no rules are
    set.
    """
    with planning_mesh(), nn.logical_axis_rules((("shardlib: no such axis", None),)):
        count = pinned_activations(jax.make_jaxpr(loss)(params, state, batch))
    return (
        (
            Finding(
                code="activation-names-ignored",
                severity="info",
                where=f"{count} of them",
                message=(
                    "the model names dims of activations and no logical axis rules are in force;"
                    " the plan places activations itself."
                ),
                hint=(
                    "to price or pin them, call shardlib.compile inside"
                    " flax.linen.logical_axis_rules(...), with honour='pins' to pin"
                ),
            ),
        )
        if count
        else ()
    )


@rare_garbage_collection()
def read_and_trace(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    name: str | None,
    rows: str = "prove",
    wrt: Filter = None,
    ambient: AbstractMesh = NO_MESH,
    honour: str = "hints",
) -> TracedModel:
    """Reads a model, and traces its loss; see `shardlib.api.plan` for the arguments.

    Args:
        init: a callable `nnx.Rngs -> nnx.Module`, or a description by `linen` or `tree`.
        loss: (model, batch) -> scalar or (scalar, metrics).
        batch_axes: logical axes of the batch; None for the convention.
        name: what to call the model; None for its own.
        wrt: what is trained; None for all parameters.
    """
    require_honour(honour)
    model = _read(init, wrt, ambient)
    if name is not None:
        model = replace(model, name=name)
    untraced, traced = model, _traced(model, loss, optimizer, batch, batch_axes, rows, ambient)
    model = traced.model
    if isinstance(init, LinenInit) and not nn.get_logical_axis_rules():
        ignored = ignored_constraints(model.bind(loss), model.params, model.state, abstract(batch))
        model = replace(model, findings=(*model.findings, *ignored))
    if isinstance(init, LinenInit):
        model = replace(model, findings=(*model.findings, *_unchanged(untraced, model, traced)))
    return TracedModel(
        model=model, traced=traced, loss=loss, optimizer=optimizer, batch=batch, honour=honour
    )


def _read(init: Init, wrt: Filter, ambient: AbstractMesh) -> Model:
    """The model; where it cannot be read with no mesh in force, as it is without its layouts."""
    try:
        return read(init, wrt)
    except AnnotationError as error:
        if error.__cause__ is None:
            raise
        try:
            return read(init, wrt, free=partial(layout_free, ambient=ambient))
        except AnnotationError:
            raise error from error.__cause__


def traced_again(model: TracedModel, batch: Tree, batch_axes: Tree) -> Traced:
    """The loss of a model traced for another batch; how it depends on the rows is not proven
    anew.
    """
    with no_mesh():
        return _traced(model.model, model.loss, model.optimizer, batch, batch_axes, "mean")


def state_stays(model: Model, traced: Traced) -> bool:
    """Returns whether a step leaves all state of a model as it is."""
    count, parameters, program = (
        len(jax.tree.leaves(model.state)),
        len(jax.tree.leaves(model.params)),
        traced.program,
    )
    return not count or program.outputs[-count:] == program.inputs[parameters : parameters + count]


@diagnostic
def _unchanged(untraced: Model, model: Model, traced: Traced) -> tuple[Finding, ...]:
    """A finding where a step leaves all state of a Linen model as it is, `untraced` as it was read:
    its loss returns no updates.
    """
    if not jax.tree.leaves(untraced.state) or not state_stays(model, traced):
        return ()
    return (
        Finding(
            code="state-unchanged",
            severity="warning",
            where=", ".join(untraced.state),
            message=(
                f"no step changes the collections {', '.join(untraced.state)}: the loss returns no"
                " updates of them."
            ),
            hint=(
                "return (loss, updates) with the updates of module.apply(..., mutable=[...]), see"
                " help(shardlib.linen); no matter where they are meant to stay"
            ),
        ),
    )


def _traced(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    batch_axes: Tree,
    rows: str,
    ambient: AbstractMesh = NO_MESH,
) -> Traced:
    """The loss of a model; that of the same model without layouts where it brings some."""

    def run(model: Model) -> Traced:
        return trace(model, loss, batch, batch_axes=batch_axes, optimizer=optimizer, rows=rows)

    if not has_mesh_or_rules(ambient):
        try:
            traced = run(model)
        except TracingError as error:
            if error.__cause__ is None:
                raise
        else:
            if not brings_layouts(traced.closed_jaxpr):
                return traced
    return run(
        replace(
            model,
            bind=lambda loss: layout_free(model.bind(loss), ambient),
            init=layout_free(model.init, ambient),
        )
    )


def problem(
    init: Init,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    *,
    batch_axes: Tree = None,
    name: str | None = None,
    wrt: Filter = None,
    rows: str = "prove",
) -> Problem:
    """Traces a model without planning it; see `shardlib.api.plan` for the arguments.

    Args:
        loss: (model, batch) -> scalar or (scalar, metrics).
        wrt: what is trained; None for all parameters.
    """
    require_arguments("problem", loss=loss, optimizer=optimizer, name=name)
    with no_mesh():
        return read_and_trace(
            init, loss, optimizer, batch, batch_axes, name, rows=rows, wrt=wrt
        ).traced.problem
