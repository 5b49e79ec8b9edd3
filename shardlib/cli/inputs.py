"""From the words of a command line to models and plans.

Numbers as a command line spells them.

>>> numbers("0-3,8", "--lost"), sizes("8..64"), sizes("8,24,16")
((0, 1, 2, 3, 8), (8, 16, 32, 64), (8, 16, 24))
>>> duration("500ms", "--ttft"), duration("3h", "--mtbf")
(0.5, 10800.0)
>>> quantity("15T", "--tokens")
15000000000000.0
>>> price("2.40", "--price"), price("2.40/h", "--price"), price("48/d", "--price")
(2.4, 2.4, 2.0)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import re
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

from typer.models import OptionInfo

from shardlib.cli.output import read_text
from shardlib.errors import BatchError, InfeasibleError, PinError, PlanError, raise_all
from shardlib.processes.progress import Progress
from shardlib.untrusted.data import JsonObject, parse_json, shown
from shardlib.wings import required

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from shardlib.planner.plan import Plan


#: Keyword arguments of `shardlib.plan` that say what is planned.
PlanInputs = dict[str, Any]


def make_plan(
    spec: str,
    topology: str,
    batch: int | None,
    seq: int | None,
    pins: JsonObject,
    refine: int = 0,
    *,
    framework: str | None = None,
) -> Plan:
    """Plans the model that a command line names; the plan remembers where it came from.

    Args:
        framework: the training framework that will run the plan; None for programs of shardlib.
    """
    from shardlib.machines.topology import topology as find_topology
    from shardlib.processes.machine import set_cpu_devices

    machine = find_topology(topology)
    vendor = machine.chip.vendor
    if refine and machine.chip.name == "cpu":  # near plans are run
        set_cpu_devices(machine.devices)
    if framework is not None:  # what is misspelt is said before anything is traced
        frameworks = required("shardlib.frameworks", f"framework {framework!r}")
        frameworks.framework(framework, vendor)
    compiling = f", compiling the {refine} best" if refine else ""
    with Progress(f"planning {spec} for {topology}{compiling}"):
        inputs = inputs_of(spec, batch, seq)
        import shardlib

        plan = shardlib.plan(
            **inputs,
            topology=topology,
            pin=pins,
            refine=refine,
            framework=framework,
        )
    origin = {
        "model": spec,
        **({"batch": str(batch)} if batch else {}),
        **({"seq": str(seq)} if seq else {}),
        "pin": json.dumps(pins),
    }
    return replace(plan, origin=tuple(origin.items()))


def inputs_of(spec: str, batch: int | None, seq: int | None) -> PlanInputs:
    """The model that a command line names, as keyword arguments of `shardlib.plan`."""
    from shardlib.models import build, example_batch
    from shardlib.models.presets import UserModel, load

    os.environ.setdefault(
        "JAX_PLATFORMS", "cpu"
    )  # planning needs no accelerator and must not occupy one
    loaded = load(spec)
    if isinstance(loaded, UserModel):
        _refuse_sizes(spec, batch, seq)
        names = ("init", "loss", "optimizer", "batch", "batch_axes", "name", "wrt", "rows")
        inputs = {name: getattr(loaded, name) for name in names}
    else:
        rows, tokens = _sizes(spec, batch, seq)
        init, loss = build(loaded)
        inputs = {
            "init": init,
            "loss": loss,
            "optimizer": None,
            "batch": example_batch(loaded, rows, tokens),
            "batch_axes": None,
            "name": loaded.name,
        }
    if inputs["optimizer"] is None:
        import optax

        inputs["optimizer"] = optax.adamw(3e-4)
    return inputs


def _sizes(spec: str, batch: int | None, seq: int | None) -> tuple[int, int]:
    if batch is None or seq is None:
        missing = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is None]
        raise BatchError(
            f"the size of the batch of {spec} is open: {' and '.join(missing)} missing\nTry:"
            " --batch 256 --seq 4096"
        )
    return batch, seq


def _refuse_sizes(spec: str, batch: int | None, seq: int | None) -> None:
    flags = [flag for flag, value in (("--batch", batch), ("--seq", seq)) if value is not None]
    if flags:
        raise BatchError(
            f"{spec} brings its own batch; {' and '.join(flags)} cannot change it\nTry: leave out"
            f" {' and '.join(flags)}"
        )


def _overrides(new: str, old: str) -> bool:
    """Returns whether a pin takes the place of another: the same decision, or the mesh and one of
    its axes.
    """
    return (
        new == old
        or (old == "mesh" and new.startswith("mesh."))
        or (new == "mesh" and old.startswith("mesh."))
    )


def replanned(plan: Plan, pins: JsonObject) -> Plan | str:
    """The best plan under other pins, or why there is none."""
    origin = dict(plan.origin)
    if "model" not in origin:
        raise PlanError(
            "the plan does not say which model it is for, so that it cannot be made again\nTry:"
            " make it with `shardlib plan MODEL ... --out plan.json`"
        )
    previous = {
        key: value
        for key, value in _origin_pins(origin).items()
        if not any(_overrides(new, key) for new in pins)
    }
    batch, seq = origin_sizes(plan)
    try:
        framework = plan.framework.name if plan.framework else None
        return make_plan(
            origin["model"], plan.topology, batch, seq, {**previous, **pins}, framework=framework
        )
    except InfeasibleError as error:
        return str(error)


def origin_sizes(plan: Plan) -> tuple[int | None, int | None]:
    """Batch and sequence that a plan was made with; None where the model brought its own."""
    origin = dict(plan.origin)
    sizes_given = [(key, origin[key]) for key in ("batch", "seq") if key in origin]
    wrong = [
        f"{key} is {shown(text)}; it is an integer of at least 1"
        for key, text in sizes_given
        if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text))
    ]
    if wrong:
        raise_all(PlanError, "the plan does not say what it was made for", wrong)
    sizes = {key: int(text) for key, text in sizes_given}
    return sizes.get("batch"), sizes.get("seq")


def _origin_pins(origin: dict[str, str]) -> PlanInputs:
    pins = parse_json(origin.get("pin", "{}"), "what the plan says of its pins", PlanError)
    if not isinstance(pins, dict):
        raise PlanError(f"the plan says that its pins are {shown(pins)}; they are an object")
    return cast("dict[str, Any]", pins)


def with_source(plan: Plan) -> Plan:
    """A plan from a file with what it was made from: its model traced again, its topology and its
    pins.
    """
    again = replanned(plan, {})
    if isinstance(again, str):
        raise PlanError(f"the plan cannot be made again: {again}")
    return _priced_here(replace(plan, source=again.source))


def _priced_here(plan: Plan) -> Plan:
    """A plan for devices whose rates are measured, at the rates of this machine; with a finding
    where it was written with others.
    """
    from shardlib.findings import Finding
    from shardlib.machines.topology import topology as find_topology
    from shardlib.planner.plan import source_of
    from shardlib.planner.questions import priced_on
    from shardlib.planner.scaling import PRICED_AGAIN
    from shardlib.report.elements import TIE, seconds_text

    source = source_of(plan)
    if source.topology == find_topology(plan.topology):  # the figures are the same everywhere
        return plan
    here = priced_on(plan, source.topology)
    if here is None:  # this machine has less memory
        return plan
    before, now = plan.estimate.step_seconds, here.estimate.step_seconds
    if abs(now - before) <= TIE * before:
        return plan
    finding = Finding(
        code=PRICED_AGAIN,
        severity="info",
        where=plan.topology,
        message=(
            f"the plan was written with {seconds_text(before)} per step, by rates measured"
            f" elsewhere or before; by those of this machine it takes {seconds_text(now)}"
        ),
    )
    return replace(plan, estimate=here.estimate).with_findings(finding)


def read_plan(path: Path, *, changed: bool = False) -> Plan:
    """Reads a plan from a file."""
    from shardlib.planner.plan import ChangedPlanError, plan_from_data

    again = f"shardlib plan MODEL --topology T ... --out {path}"
    text = read_text(path, "plan", again, PlanError)
    try:
        return plan_from_data(parse_json(text, "the plan", PlanError, hint=again), changed=changed)
    except ChangedPlanError as error:
        raise PlanError(f"{path}: {error}") from error
    except PlanError as error:
        raise PlanError(f"{path} holds no plan: {error}") from error


def parse_pins(words: list[str]) -> JsonObject:
    """Pins from the command line: `key=value` with the value as JSON, or else as a string."""
    pins: dict[str, Any] = {}
    failures: list[str] = []
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not key or not equals or not value:
            failures.append(f"{word!r} is not KEY=VALUE")
        elif key in pins:
            failures.append(f"{key!r} is given twice")
        elif re.search(r"[,;\s][a-z][\w.]*=", value):
            failures.append(f"{word!r} is several decisions; each has an option of its own")
        else:
            pins[key] = _value(value)
    if failures:
        raise_all(
            PinError,
            "pins are not usable",
            failures,
            hint="for example --pin mesh.tensor=8 --pin remat=full",
        )
    if pins:
        from shardlib.decisions.pins import Pins, full_names

        Pins.parse(pins)
        pins = {**full_names(pins)}
    return pins


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


#: Quantities below it are spelled with a unit.
LEAST = 1_000_000


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Numbers and ranges: "0-3,8"; nothing for an empty text."""
    listed: list[int] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise PlanError(
                f"{what} has {word!r}, which is neither a number nor a range\nTry: {what} 0-7,16"
            )
        listed += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(set(listed)))


def sizes(text: str) -> tuple[int, ...]:
    """Numbers of devices: "8..16384" doubles from the first to the last, "8,24" lists them;
    ascending.
    """
    match = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if match is not None and 0 < int(match[1]) <= int(match[2]):
        first, last = int(match[1]), int(match[2])
        return tuple(first << step for step in range((last // first).bit_length()))
    counts = (
        sorted(int(word) for word in text.split(","))
        if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text)
        else []
    )
    if not counts or counts[0] < 1:
        raise PlanError(
            f"{text!r} says no numbers of devices\nTry: 8..16384 for doublings, or 8,24,48"
        )
    twice = [str(number) for number, after in itertools.pairwise(counts) if number == after]
    if twice:
        once = ",".join(map(str, dict.fromkeys(counts)))
        raise PlanError(f"{text!r} names {', '.join(dict.fromkeys(twice))} twice\nTry: {once}")
    return tuple(counts)


def duration(text: str, what: str) -> float:
    """Seconds of "500ms", "2s", "300us", "10m", "3h" or "30d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m|h|d|)\s*", text)
    if match is not None and not match[2]:
        likely = f"{match[1]}s, {match[1]}h or {match[1]}d"
        raise PlanError(f"{what} {text!r} has no unit: us, ms, s, m, h or d\nTry: {what} {likely}")
    if match is None or not float(match[1]):
        more = ", above 0" if match is not None else ", a number and us, ms, s, m, h or d"
        many = "; a number of devices after @ is for `shardlib compare`" if "@" in text else ""
        raise PlanError(f"{what} {text!r} is not a duration{more}{many}\nTry: {what} 3h, or 500ms")
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return float(match[1]) * units[match[2]]


def quantity(text: str, what: str) -> float:
    """A number with K, M, B (or G), or T for thousands, millions, billions, trillions."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMBGT]?)\s*", text.upper())
    if match is not None and not match[2] and 0 < float(match[1]) < LEAST:
        raise PlanError(
            f"{what} {text!r} has no unit, K, M, B or T, and is less than {LEAST:,}\nTry: {what}"
            f" {match[1]}B or {match[1]}T"
        )
    if match is None or not float(match[1]):
        raise PlanError(
            f"{what} {text!r} is not a number above 0, which K, M, B or T may follow\nTry:"
            f" {what} 15T"
        )
    return float(match[1]) * {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2]]


def price(text: str, what: str) -> float:
    """Money of an hour: "2.40", "2.40/h", or "57.60/d"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:/\s*(h|d))?\s*", text)
    if match is None:
        word = what if what.endswith("=") else f"{what} "
        raise PlanError(
            f"{word}{text!r} is not a price: a number in your own money, of an hour, or with /h or"
            f" /d\nTry: {word}2.40/h"
        )
    return float(match[1]) / {None: 1.0, "h": 1.0, "d": 24.0}[match[2]]


# --------------------------------------------------------------------------------------------------
# Options of a command that belong together, as one value.
#
# A command may take dataclasses whose fields are options; `spread` makes of each field an option
# of the command, in the order of the fields, so that the help and the words are those of one long
# list.
#
#     @dataclass(frozen=True, kw_only=True)
#     class Sizes:
#         batch: Annotated[int | None, typer.Option("--batch", "-b")] = None
#         seq: Annotated[int | None, typer.Option("--seq", "-s")] = None
#
#     @app.command("plan")
#     @spread
#     def plan_command(model: Model, sizes: Sizes) -> None: ...
#
# `shardlib plan demo --batch 8` calls it with `Sizes(batch=8)`.


def spread(command: Callable[..., None], **groups: type) -> Callable[..., None]:
    """A command as Typer reads it, with the fields of its groups in place of each group."""
    hints = {**get_type_hints(command, include_extras=True), **groups}
    parameters: list[inspect.Parameter] = []
    groups_by_name: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups_by_name[parameter.name] = kind  # pyright: ignore[reportArgumentType]
            parameters += _options(kind)  # pyright: ignore[reportArgumentType]
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
            )

    @functools.wraps(command)
    def run(**options: Any) -> None:
        values = {
            name: kind(**{f.name: options.pop(f.name, f.default) for f in fields(kind)})
            for name, kind in groups_by_name.items()
        }
        command(**options, **values)

    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(kind: type[Any]) -> list[inspect.Parameter]:
    """The options of a group; help has them under what its docstring says."""
    hints = get_type_hints(kind, include_extras=True)
    title = (kind.__doc__ or "").splitlines()[0].removeprefix("Options of ").rstrip(".")
    for name, hint in hints.items():
        option = copy(hint.__metadata__[0])  # others may share it
        option.rich_help_panel = title[:1].upper() + title[1:]
        hints[name] = Annotated[hint.__origin__, option]
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]


def given(group: DataclassInstance) -> dict[str, object]:
    """The options of a group that a command line gave, as it spells them, with their values."""
    hints = get_type_hints(type(group), include_extras=True)
    values = {field.name: getattr(group, field.name) for field in fields(group)}
    return {
        _spelled(hints[name]): value
        for name, value in values.items()
        if value is not None and value is not False and value != []
    }


def _spelled(hint: Any) -> str:
    """The first name of an option, from its annotation."""
    option = next(
        annotation for annotation in hint.__metadata__ if isinstance(annotation, OptionInfo)
    )
    words = [option.default, *(option.param_decls or ())]
    return next(word for word in words if isinstance(word, str) and word.startswith("--"))
